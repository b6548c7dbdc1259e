import pytest

from vllm_kvpp.planner.config_file import ConfigFile, read_config
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.model import read_model


def test_the_latent_has_the_widths_of_the_configuration(model):
    narrow = model(kv_lora_rank=256, qk_rope_head_dim=32)

    assert (narrow.latent_width, narrow.rotary_width) == (256, 32)


@pytest.mark.parametrize("name", ["text_config", "language_config"])
def test_a_nested_language_model_is_read_with_the_quantization_outside(name, config):
    nested = {"architectures": ["ForConditionalGeneration"], name: config(), "quantization_config": {"bits": 4}}
    shape = read_model(ConfigFile("nested", nested))

    assert (shape.architecture, shape.num_layers) == ("ForConditionalGeneration", 8)
    assert shape.fields.get("quantization_config") == {"bits": 4}


def test_kimi_k2_5_is_read_from_its_text_config():
    config = read_config("Kimi-K2.5")

    assert "num_hidden_layers" not in config.values
    assert read_model(config).num_layers == 61


@pytest.mark.parametrize(
    ("changes", "num_layers"),
    [
        ({"num_layers": 28, "num_hidden_layers": None}, 28),
        ({"num_layers": 28, "num_hidden_layers": 56}, 28),
        ({"num_hidden_layers": 56}, 28),
    ],
)
def test_a_model_with_two_attentions_a_layer_has_half_the_layers_of_its_attentions(changes, num_layers, model):
    shape = model(model_type="longcat_flash", **changes)

    assert (shape.num_layers, shape.attentions_per_layer) == (num_layers, 2)


@pytest.mark.parametrize("field", ["num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "num_attention_heads"])
def test_a_missing_field_is_named(field, model):
    with pytest.raises(PlannerError, match=field):
        model(**{field: None})


@pytest.mark.parametrize("value", [0, -1, True, 8.5, "8", [8], 10**12])
def test_a_field_that_makes_no_sense_is_named_with_its_value(value, model):
    with pytest.raises(PlannerError, match="num_hidden_layers is "):
        model(num_hidden_layers=value)


def test_more_layers_than_any_model_has_are_refused(model):
    with pytest.raises(PlannerError, match="100,000"):
        model(num_hidden_layers=100_000)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": None}, "bfloat16"),
    ],
)
def test_the_type_is_the_checkpoints_and_never_wider_than_16_bits(changes, dtype, model):
    assert model(**changes).dtype == dtype


def test_a_type_that_is_not_the_checkpoints_is_noted(model):
    assert model().notes == ()
    assert "float32" in model(torch_dtype="float32").notes[0]


def test_an_unknown_type_is_refused(model):
    with pytest.raises(PlannerError, match="int3"):
        model(torch_dtype="int3")
