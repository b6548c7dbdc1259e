"""Groups of four and of eight ranks."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_config
from engine_process import EngineRun, run_engine
from recall_runs import OFF_WORKLOAD, ON_WORKLOAD, RECALL_ENGINE, REPORT, kvpp

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_tp_4_answers_equal_those_without_kvpp_bit_for_bit(
    workload: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = {**RECALL_ENGINE, "tensor_parallel_size": 4}
    off = run_engine({**engine, "additional_config": kvpp(False)}, [workload], tmp_path_factory.mktemp("off4"), 400)
    on = run_engine(
        {**engine, "additional_config": kvpp(True)}, [workload, REPORT], tmp_path_factory.mktemp("on4"), 400
    )
    assert on.answers(ON_WORKLOAD) == off.answers(OFF_WORKLOAD)
    assert [report["owned_layers"] for report in on.actions[1]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(report["counters"]["transfers"] > 0 for report in on.actions[1])
    # Two owned layers and two scratch buffers of eight layers: twice the tokens, less the alignment of one buffer.
    assert 1.9 < on.num_gpu_blocks / off.num_gpu_blocks <= 2.0


@pytest.fixture(scope="module")
def deep_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, EngineRun]:
    """61 layers with the real cache width on 8 ranks, everything else tiny; keyed by KVPP on."""
    model = tmp_path_factory.mktemp("deep")
    write_config(model, num_layers=61, num_heads=8)
    engine = {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 256,
        "tensor_parallel_size": 8,
        "kv_cache_memory_bytes": 256 * 1024 * 1024,
    }

    def run(is_on: bool, folder: Path) -> EngineRun:
        return run_engine({**engine, "additional_config": kvpp(is_on)}, [REPORT] if is_on else [], folder, 400)

    return {is_on: run(is_on, tmp_path_factory.mktemp("run")) for is_on in (False, True)}


def test_61_layers_on_8_ranks_hold_6_times_the_tokens_in_vllms_own_log(deep_runs: dict[bool, EngineRun]) -> None:
    off, on = deep_runs[False], deep_runs[True]
    assert f"KV cache size: {off.num_tokens:,} tokens" in off.log
    assert f"KV cache size: {on.num_tokens:,} tokens" in on.log
    # The formula's factor is 61 / (8 + 2); the blocks are whole ones on both sides.
    assert on.num_gpu_blocks == pytest.approx(off.num_gpu_blocks * 6.1, abs=6.1)


def test_the_last_ranks_own_one_layer_less(deep_runs: dict[bool, EngineRun]) -> None:
    reports = deep_runs[True].actions[0]
    assert [len(report["owned_layers"]) for report in reports] == [8, 8, 8, 8, 8, 7, 7, 7]
    assert all(report["allocated_bytes"] <= report["available_bytes"] for report in reports)
