import pytest

from vllm_kvpp.planner.config_file import read_config
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.model import read_model

SPARSE = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}


def layers_with_indexer(model, **changes):
    return sorted(model(**SPARSE, **changes).indexer.layers)


def test_without_index_topk_there_is_no_indexer(model):
    assert model(index_topk=None, index_head_dim=128).indexer is None


def test_every_layer_has_an_indexer_unless_the_configuration_says_otherwise(model):
    assert layers_with_indexer(model) == list(range(8))


def test_a_frequency_leaves_out_layers_behind_the_offset(model):
    assert layers_with_indexer(model, index_topk_freq=4, index_skip_topk_offset=3) == [0, 1, 2, 6]
    assert layers_with_indexer(model, index_topk_freq=4) == [0, 1, 5]


@pytest.mark.parametrize("pattern", ["FFSSFSSS", list("FFSSFSSS")])
def test_a_pattern_goes_before_a_frequency(pattern, model):
    assert layers_with_indexer(model, index_topk_pattern=pattern, index_topk_freq=4) == [0, 1, 4]


def test_layers_behind_the_end_of_a_pattern_have_an_indexer(model):
    assert layers_with_indexer(model, index_topk_pattern="FSS") == [0, 3, 4, 5, 6, 7]


def test_glm_5_2_has_the_indexers_that_its_own_list_names():
    config = read_config("zai-org/GLM-5.2")
    shape = read_model(config)

    assert len(shape.indexer.layers) == 21
    assert shape.indexer.layers == {n for n, kind in enumerate(config.values["indexer_types"]) if kind == "full"}
    assert shape.notes == ()


def test_a_list_that_vllm_does_not_follow_is_noted(model):
    shape = model(**SPARSE, indexer_types=["full", *["shared"] * 7])

    assert len(shape.indexer.layers) == 8
    assert "indexer_types names 1" in shape.notes[0]


@pytest.mark.parametrize("field", ["index_head_dim", "index_n_heads"])
def test_a_missing_field_of_the_indexer_is_named(field, model):
    with pytest.raises(PlannerError, match=field):
        model(**{**SPARSE, field: None})


def test_a_pattern_of_another_kind_is_refused(model):
    with pytest.raises(PlannerError, match="index_topk_pattern"):
        model(**SPARSE, index_topk_pattern=4)
