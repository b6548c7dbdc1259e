import pytest

from vllm_kvpp.planner.cache_dtype import resolve_cache_dtype
from vllm_kvpp.planner.config_file import read_config
from vllm_kvpp.planner.devices import find_device
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.model import read_model


def resolve(asked, name, gpu=None):
    dtype, _ = resolve_cache_dtype(asked, read_model(read_config(name)), find_device(gpu) if gpu else None)
    return dtype


def test_fp8_of_sparse_attention_is_packed_on_hopper_and_plain_elsewhere():
    assert resolve("fp8", "glm-5.2", "h200") == "fp8_ds_mla"
    assert resolve("fp8", "glm-5.2", "b200") == "fp8"
    assert resolve("fp8", "deepseek-v3", "h200") == "fp8"


def test_without_a_device_the_packed_type_is_hinted_at():
    dtype, notes = resolve_cache_dtype("fp8", read_model(read_config("glm-5.2")), None)

    assert dtype == "fp8"
    assert "fp8_ds_mla" in notes[0]


def test_auto_is_8_bits_for_glm_on_blackwell_only():
    assert resolve("auto", "glm-5.2", "b200") == "fp8_e4m3"
    assert resolve("auto", "glm-5.2", "h200") == "auto"
    assert resolve("auto", "deepseek-v3.2", "b200") == "auto"
    assert resolve("bfloat16", "glm-5.2", "b200") == "bfloat16"


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_auto_follows_a_checkpoint_of_modelopt(quantization, model):
    shape = model(quantization_config=quantization)

    assert resolve_cache_dtype("auto", shape, None)[0] == "fp8_e4m3"
    assert resolve_cache_dtype("bfloat16", shape, None) == ("bfloat16", ())


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {"quant_method": "modelopt"},
        {"quant_method": "fp8", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ],
)
def test_auto_stays_the_models_type_with_any_other(quantization, model):
    assert resolve_cache_dtype("auto", model(quantization_config=quantization), None) == ("auto", ())


def test_a_type_of_the_checkpoint_that_is_unknown_is_refused(model):
    shape = model(quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"})

    with pytest.raises(PlannerError, match=r"'NVFP4'.*name the type with --kv-cache-dtype"):
        resolve_cache_dtype("auto", shape, None)
