"""Groups of four and of eight ranks."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_config
from engine_process import EngineRun, run_engine, write_plugin
from recall_runs import RECALL_ENGINE, REPORT, kvpp, kvpp_every_way, rpc

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def tp_4_runs(workload: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, EngineRun]:
    """The recall model on 4 ranks, keyed by KVPP on.

    Actions: workload, then fingerprints (off), or reports and the workload with transfers stopped, with decode at the
    owner, and with every rank attending to what it holds, and both again in place (on).
    """

    def run(is_on: bool, folder: Path) -> EngineRun:
        write_plugin(folder, "rank_equal_sums")
        engine = {**RECALL_ENGINE, "tensor_parallel_size": 4, "additional_config": kvpp_every_way(is_on)}
        on = [
            *(REPORT, rpc("sabotage_transfers", []), workload),
            *(rpc("restore_transfers"), rpc("set_decode", "owner"), workload, REPORT),
            *(rpc("sabotage_decode"), workload, rpc("restore_decode")),
            *(rpc("set_decode", "in_place"), workload, REPORT, rpc("sabotage_decode"), workload),
        ]
        rest = on if is_on else [rpc("digest_caches")]
        return run_engine(engine, [workload, *rest], folder, timeout_seconds=400)

    return {is_on: run(is_on, tmp_path_factory.mktemp("tp4")) for is_on in (False, True)}


def test_without_kvpp_all_ranks_hold_the_same_cache(tp_4_runs: dict[bool, EngineRun]) -> None:
    first, *others = tp_4_runs[False].actions[1]
    assert len(first) == 8
    assert others == [first] * 3


@pytest.mark.proves("TP 4")
def test_tp_4_answers_equal_those_without_kvpp_bit_for_bit(tp_4_runs: dict[bool, EngineRun]) -> None:
    assert tp_4_runs[True].answers(0) == tp_4_runs[False].answers(0)
    assert all(report["counters"]["transfers"] > 0 for report in tp_4_runs[True].actions[1])


@pytest.mark.proves("TP 4")
def test_tp_4_answers_differ_when_nothing_is_moved(tp_4_runs: dict[bool, EngineRun]) -> None:
    assert tp_4_runs[True].answers(3) != tp_4_runs[False].answers(0)


@pytest.mark.proves("TP 4")
def test_tp_4_answers_with_decode_at_the_owner_equal_those_without_kvpp_bit_for_bit(
    tp_4_runs: dict[bool, EngineRun],
) -> None:
    assert tp_4_runs[True].answers(6) == tp_4_runs[False].answers(0)
    for before, after in zip(tp_4_runs[True].actions[1], tp_4_runs[True].actions[7], strict=True):
        assert after["counters"]["steps_at_owner"] > before["counters"]["steps_at_owner"] == 0


@pytest.mark.proves("TP 4")
def test_tp_4_answers_differ_when_every_rank_attends_to_what_it_holds(tp_4_runs: dict[bool, EngineRun]) -> None:
    assert tp_4_runs[True].answers(9) != tp_4_runs[False].answers(0)


@pytest.mark.proves("TP 4")
def test_tp_4_answers_differ_when_every_rank_reads_what_it_holds_itself(tp_4_runs: dict[bool, EngineRun]) -> None:
    assert tp_4_runs[True].answers(15) != tp_4_runs[False].answers(0)


@pytest.mark.proves("TP 4")
def test_tp_4_answers_with_decode_in_place_equal_those_without_kvpp_bit_for_bit(
    tp_4_runs: dict[bool, EngineRun],
) -> None:
    assert tp_4_runs[True].answers(12) == tp_4_runs[False].answers(0)
    for before, after in zip(tp_4_runs[True].actions[7], tp_4_runs[True].actions[13], strict=True):
        assert after["counters"]["steps_in_place"] > before["counters"]["steps_in_place"] == 0
        assert after["counters"]["transfers"] == before["counters"]["transfers"]


def test_four_ranks_own_two_layers_each_and_hold_twice_the_tokens(tp_4_runs: dict[bool, EngineRun]) -> None:
    assert [report["owned_layers"] for report in tp_4_runs[True].actions[1]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # Two owned layers and two scratch buffers instead of eight layers, less the alignment of one buffer.
    assert tp_4_runs[True].num_gpu_blocks == pytest.approx(2 * tp_4_runs[False].num_gpu_blocks, rel=0.05)


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
        return run_engine(
            {**engine, "additional_config": kvpp(is_on)}, [REPORT] if is_on else [], folder, timeout_seconds=400
        )

    return {is_on: run(is_on, tmp_path_factory.mktemp("run")) for is_on in (False, True)}


@pytest.mark.proves("TP 8")
def test_61_layers_on_8_ranks_hold_6_times_the_tokens_in_vllms_own_log(deep_runs: dict[bool, EngineRun]) -> None:
    off, on = deep_runs[False], deep_runs[True]
    assert f"KV cache size: {off.num_tokens:,} tokens" in off.log
    assert f"KV cache size: {on.num_tokens:,} tokens" in on.log
    # The formula's factor is 61 / (8 + 2); the blocks are whole ones on both sides, and a page ends the allocation.
    assert on.num_gpu_blocks == pytest.approx(off.num_gpu_blocks * 6.1, abs=6.1)


def test_the_last_ranks_own_one_layer_less(deep_runs: dict[bool, EngineRun]) -> None:
    reports = deep_runs[True].actions[0]
    assert [len(report["owned_layers"]) for report in reports] == [8, 8, 8, 8, 8, 7, 7, 7]
    assert all(report["allocated_bytes"] <= report["available_bytes"] for report in reports)
