from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_kvpp.planner.cache_specs import KV_CACHE_DTYPES, choose_latent_form, list_stage_caches
from vllm_kvpp.planner.errors import PlannerError

SPARSE = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}


def list_pages(model, *, partition=None, dtype="bfloat16", kv_cache_dtype="auto", has_drafts=False):
    latent = choose_latent_form(model, kv_cache_dtype, dtype)
    stages = list_stage_caches(
        model, partition or [model.num_layers], block_size=16, latent=latent, has_drafts=has_drafts
    )
    return [{cache.name: cache.page_size_bytes for cache in stage.caches} for stage in stages]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "bytes_per_token"),
    [
        ("auto", "bfloat16", 1152),
        ("auto", "float32", 2304),
        ("float16", "float32", 1152),
        ("fp8", "bfloat16", 576),
        ("fp8_e4m3", "bfloat16", 576),
        ("fp8_ds_mla", "bfloat16", 656),
    ],
)
def test_a_page_has_the_bytes_of_the_cache_type(kv_cache_dtype, dtype, bytes_per_token, model):
    (pages,) = list_pages(model(), dtype=dtype, kv_cache_dtype=kv_cache_dtype)

    assert set(pages.values()) == {bytes_per_token * 16}
    assert list(pages) == [f"model.layers.{number}.self_attn.attn" for number in range(8)]


def test_an_indexer_adds_132_bytes_a_token_to_its_layers(model):
    (pages,) = list_pages(model(**SPARSE, index_topk_pattern="FSSSSSSF"))
    indexers = {name: page for name, page in pages.items() if "indexer" in name}

    assert indexers == {f"model.layers.{number}.self_attn.indexer.k_cache": 132 * 16 for number in (0, 7)}


def test_a_layer_with_two_attentions_has_two_caches(model):
    (pages,) = list_pages(model(model_type="longcat_flash", num_layers=2))

    assert list(pages) == [f"model.layers.{layer}.self_attn.{index}.attn" for layer in (0, 1) for index in (0, 1)]


def test_draft_layers_are_on_the_last_stage_and_always_have_an_indexer(model):
    shape = model(**SPARSE, index_topk_pattern="S" * 8, num_nextn_predict_layers=1)
    first, last = list_pages(shape, partition=[5, 3], has_drafts=True)

    assert len(first) == 5
    assert sorted(last)[-2:] == ["model.layers.8.self_attn.attn", "model.layers.8.self_attn.indexer.k_cache"]


def test_stages_hold_consecutive_layers(model):
    latent = choose_latent_form(model(), "auto", "bfloat16")
    stages = list_stage_caches(model(), [3, 5], block_size=16, latent=latent, has_drafts=False)

    assert [stage.layers for stage in stages] == [range(3), range(3, 8)]


def test_drafts_of_a_model_that_has_none_are_refused(model):
    with pytest.raises(PlannerError, match="--draft is mtp"):
        list_pages(model(), has_drafts=True)


def test_the_packed_type_is_refused_for_latents_that_it_cannot_pack(model):
    with pytest.raises(PlannerError, match=r"512 \+ 64 .* 256 \+ 64"):
        list_pages(model(kv_lora_rank=256), kv_cache_dtype="fp8_ds_mla")


def test_an_indexer_of_an_unknown_shape_is_refused(model):
    with pytest.raises(PlannerError, match="index_head_dim"):
        list_pages(model(**{**SPARSE, "index_head_dim": 100}))


def test_an_unknown_cache_type_lists_the_known_ones(model):
    with pytest.raises(PlannerError, match="fp8_ds_mla"):
        list_pages(model(), kv_cache_dtype="int3")


def test_vllm_knows_every_cache_type_and_packs_a_token_into_656_bytes():
    root = Path(find_spec("vllm").submodule_search_locations[0])

    assert all(f'"{name}"' in (root / "config/cache.py").read_text() for name in KV_CACHE_DTYPES)
    assert '"fp8_ds_mla": 656' in (root / "model_executor/layers/attention/mla_attention.py").read_text()
