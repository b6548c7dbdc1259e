import pytest

from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.weights import read_weights

SIZES = {
    "hidden_size": 1024,
    "vocab_size": 1000,
    "intermediate_size": 4096,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


@pytest.fixture
def weights(model):
    return lambda **changes: read_weights(model(**{**SIZES, **changes}))


def test_experts_begin_behind_the_dense_layers(weights):
    assert [weights().is_sparse(number) for number in range(3)] == [False, True, True]
    assert [weights(moe_layer_freq=2).is_sparse(number) for number in range(4)] == [False, True, False, True]


def test_a_model_without_experts_has_dense_layers_only(weights):
    dense = weights(n_routed_experts=None, moe_intermediate_size=None)

    assert dense.count_layer(5) == dense.attention + dense.replicated + 3 * 1024 * 4096


def test_tensor_parallelism_divides_what_is_not_replicated(weights):
    shape = weights()

    assert shape.layer_bytes(0, 1) - shape.layer_bytes(0, 2) == shape.attention + shape.dense
    assert shape.layer_bytes(0, 1) == 2 * shape.count_layer(0)


@pytest.mark.parametrize(
    ("quantization", "expert_bytes", "linear_bytes"),
    [
        (None, 2.0, 2.0),
        ({"quant_method": "fp8"}, 1.0, 1.0),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, 1.0, 1.0),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, 4.5 / 8, 2.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5 / 8, 2.0),
        ({"quant_method": "awq", "bits": 4}, 4.5 / 8, 4.5 / 8),
        ({"quant_method": "gptq", "bits": 8}, 1.0, 1.0),
    ],
)
def test_a_parameter_takes_the_bytes_of_its_quantization(quantization, expert_bytes, linear_bytes, weights):
    precision = weights(quantization_config=quantization).precision

    assert (precision.expert_bytes, precision.linear_bytes) == (expert_bytes, linear_bytes)


def test_an_unknown_quantization_asks_for_the_memory(weights):
    with pytest.raises(PlannerError, match=r"'ternary'.*--kv-memory"):
        weights(quantization_config={"quant_method": "ternary"})


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "intermediate_size", "v_head_dim"])
def test_a_missing_field_is_named(field, weights):
    with pytest.raises(PlannerError, match=field):
        weights(**{field: None})
