import pytest

from vllm_kvpp.planner.compute import ComputeEstimate, Step
from vllm_kvpp.planner.config_file import read_config
from vllm_kvpp.planner.devices import find_device
from vllm_kvpp.planner.model import read_model
from vllm_kvpp.planner.weights import read_weights


@pytest.fixture
def estimate():
    def make(name="deepseek-v3", tp_size=8):
        model = read_model(read_config(name))
        return ComputeEstimate(find_device("h200"), model, read_weights(model), tp_size, 1152)

    return make


def decode(num_requests, history):
    return Step("decode", num_requests, 1, history)


def test_one_decoded_token_reads_its_experts_and_not_all(estimate):
    few, many = (estimate().layer_seconds(10, decode(number, 64)) for number in (1, 512))

    # 8 of 256 experts, beside attention and the shared one.
    assert few < many / 5


def test_a_long_history_takes_time_to_read(estimate):
    reads = [estimate().layer_seconds(10, decode(64, history)) for history in (0, 32_768)]

    assert reads[1] - reads[0] == pytest.approx(64 * 32_768 * 1152 / (4800e9 * 0.8))


def test_sparse_attention_reads_the_latents_it_chose_and_all_of_the_indexer(estimate):
    sparse = estimate("deepseek-v3.2")
    reads = [sparse.layer_seconds(10, decode(64, history)) for history in (32_768, 65_536)]

    assert reads[1] - reads[0] == pytest.approx(64 * 32_768 * 128 / (4800e9 * 0.8))


def test_a_chunk_is_bound_by_operations(estimate):
    chunk = Step("prefill chunk", 1, 8192, 0)
    # 37 billion parameters are active in 61 layers.
    at_least = 2 * 8192 * 37e9 / 61 / 8 / (1979e12 * 0.5)

    assert estimate().layer_seconds(10, chunk) > 0.8 * at_least


def test_more_ranks_take_less_time_each(estimate):
    assert estimate(tp_size=16).layer_seconds(10, decode(8, 0)) < estimate(tp_size=8).layer_seconds(10, decode(8, 0))
