import pytest

from vllm_kvpp.planner.devices import GIB, find_device
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.memory import parse_memory


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("46.80", int(46.80 * GIB)),
        ("46.80GiB", int(46.80 * GIB)),
        (" 256 mib ", 256 * 1024**2),
        ("40GB", 40 * 10**9),
        ("268435456B", 268_435_456),
    ],
)
def test_memory_is_read_with_its_unit_and_in_gib_without(text, num_bytes):
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "0", "0GiB", "-1", "lots", "1e3", "nan", "40 apples", "0.4B", "9" * 15, "9" * 400]
)
def test_an_amount_that_is_none_is_refused(text):
    with pytest.raises(PlannerError, match="--kv-memory is "):
        parse_memory(text)


def test_an_estimate_leaves_what_weights_and_run_time_do_not_take(plan):
    (memory,) = plan("deepseek-v3", gpu="h200", gpu_memory_utilization=0.9).memories
    device = find_device("h200")

    assert memory.is_estimate
    # 671 billion parameters, 8 bits each but for embeddings, over 8 ranks, and what all ranks hold.
    assert memory.weight_bytes / GIB == pytest.approx(671e9 / 8 / GIB, rel=0.05)
    total = memory.available_bytes + memory.weight_bytes + memory.runtime_bytes
    assert total == int(device.memory_bytes * 0.9)


def test_memory_that_is_given_goes_before_the_device(plan):
    (memory,) = plan("deepseek-v3", gpu="h200", kv_memory="20GiB").memories

    assert (memory.available_bytes, memory.is_estimate) == (20 * GIB, False)


def test_draft_layers_weigh_on_the_last_stage_only(plan):
    options = {"gpu": "b200", "pp_size": 2, "tp_size": 8}
    without = plan("deepseek-v3", **options).memories
    first, last = plan("deepseek-v3", **options, draft="mtp").memories

    assert first.weight_bytes == without[0].weight_bytes
    assert last.weight_bytes > without[1].weight_bytes + GIB


def test_weights_that_do_not_fit_are_refused_with_their_size(plan):
    with pytest.raises(PlannerError, match=r"weights of about \d+\.\d GiB a rank leave nothing.*raise --tp"):
        plan("zai-org/GLM-5.2", gpu="h100")


@pytest.mark.parametrize("utilization", [0, -1, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(utilization, plan):
    with pytest.raises(PlannerError, match="--gpu-memory-utilization is "):
        plan("deepseek-v3", gpu="h200", gpu_memory_utilization=utilization)
