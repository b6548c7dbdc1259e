"""Speculative decoding with MTP: draft caches are kept by every rank, and target layers are moved as ever."""

import random
from typing import Any

import pytest
from checkpoints import write_mtp_checkpoint
from engine_process import EngineRun, run_engine
from recall_runs import REPORT, kvpp, rpc

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# With fewer, a rank receives so few layers that none is overwritten in the scratch buffers: nothing would have to move.
NUM_LAYERS = 6
PAGE_BYTES = 16 * 576 * 4


def _workload() -> dict[str, Any]:
    generator = random.Random(7)
    prompts = [[generator.randrange(2, 512) for _ in range(length)] for length in (20, 33, 48)]
    return {"kind": "generate", "prompts": prompts, "lengths": [10, 12, 14]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, EngineRun]:
    model = write_mtp_checkpoint(tmp_path_factory.mktemp("mtp"), num_layers=NUM_LAYERS)
    engine = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 256,
        "tensor_parallel_size": 2,
        "kv_cache_memory_bytes": 64 * 1024 * 1024,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    }
    on_actions = [_workload(), REPORT, rpc("sabotage_transfers", []), _workload()]
    return {
        is_on: run_engine(
            {**engine, "additional_config": kvpp(is_on)},
            on_actions if is_on else [_workload()],
            tmp_path_factory.mktemp("run"),
        )
        for is_on in (False, True)
    }


def test_answers_with_drafts_equal_those_without_kvpp_bit_for_bit(runs: dict[bool, EngineRun]) -> None:
    assert runs[True].answers(0) == runs[False].answers(0)


def test_answers_with_drafts_differ_when_target_layers_are_not_moved(runs: dict[bool, EngineRun]) -> None:
    assert runs[True].answers(3) != runs[False].answers(0)


def test_draft_caches_are_in_the_budget_of_every_rank_and_own_no_layer(runs: dict[bool, EngineRun]) -> None:
    for report in runs[True].actions[1]:
        assert report["num_target_layers"] == NUM_LAYERS
        assert report["bytes_per_block"]["draft"] == PAGE_BYTES
        assert report["allocated_bytes"] <= report["available_bytes"]
    assert [report["owned_layers"] for report in runs[True].actions[1]] == [[0, 1, 2], [3, 4, 5]]


def test_only_target_layers_are_moved(runs: dict[bool, EngineRun]) -> None:
    for report in runs[True].actions[1]:
        counters = report["counters"]
        assert counters["transfers"] == NUM_LAYERS * counters["steps_with_history"] > 0
