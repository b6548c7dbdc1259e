"""KVPP on against off, TP 2: same answers to the bit, more tokens, and wrong answers once a layer is not moved."""

import mmap

import pytest
from engine_process import EngineRun
from recall_runs import (
    KV_BYTES,
    NUM_GENERATED,
    OFF_AGAIN,
    OFF_PREFILL_ONLY,
    OFF_WORKER,
    OFF_WORKLOAD,
    ON_AGAIN,
    ON_NOTHING_MOVED,
    ON_ONE_LAYER_NOT_MOVED,
    ON_PREFILL_ONLY,
    ON_REPORT,
    ON_REPORT_AFTER_AGAIN,
    ON_REPORT_AFTER_PREFILL,
    ON_RESTORED,
    ON_WORKER,
    ON_WORKLOAD,
    Marking,
)

from vllm_kvpp.plan import LayerCache, fit_num_blocks, plan_cache

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_LAYERS = 8
PAGE_BYTES = 16 * 576 * 4  # block size x latent width x float32
# 22 rows are 1/128 of the memory; a row has the heads of a rank, and twice those of both.
EXCHANGE_BYTES = 22 * (2 + 2 * 4) * 576 * 4


@pytest.mark.proves("TP 2", "model runner V1", "the `LLM` class")
@pytest.mark.parametrize(
    ("off_index", "on_index"),
    [(OFF_WORKLOAD, ON_WORKLOAD), (OFF_PREFILL_ONLY, ON_PREFILL_ONLY), (OFF_AGAIN, ON_AGAIN)],
    ids=["first use of the pool", "prefill only", "reused blocks"],
)
def test_token_ids_and_logprobs_equal_those_without_kvpp_bit_for_bit(
    off_run: EngineRun, on_run: EngineRun, off_index: int, on_index: int
) -> None:
    assert on_run.answers(on_index) == off_run.answers(off_index)


def test_the_recall_answers_are_right_with_and_without_kvpp(
    off_run: EngineRun, on_run: EngineRun, marking: Marking
) -> None:
    assert marking.share_of_right_answers(off_run, OFF_WORKLOAD) == 1.0
    assert marking.share_of_right_answers(on_run, ON_WORKLOAD) == 1.0
    assert marking.share_of_right_words(on_run, ON_WORKLOAD) > 0.95


def test_recited_words_go_wrong_when_nothing_is_moved(off_run: EngineRun, on_run: EngineRun, marking: Marking) -> None:
    assert on_run.answers(ON_NOTHING_MOVED) != off_run.answers(OFF_WORKLOAD)
    assert marking.share_of_right_words(on_run, ON_NOTHING_MOVED) < 0.6


def test_logprobs_differ_when_one_layer_of_eight_is_not_moved(off_run: EngineRun, on_run: EngineRun) -> None:
    assert on_run.answers(ON_ONE_LAYER_NOT_MOVED) != off_run.answers(OFF_WORKLOAD)


def test_answers_are_equal_again_once_layers_are_moved_again(off_run: EngineRun, on_run: EngineRun) -> None:
    assert on_run.answers(ON_RESTORED) == off_run.answers(OFF_WORKLOAD)


def test_vllm_reports_exactly_the_blocks_of_the_plan(off_run: EngineRun, on_run: EngineRun) -> None:
    caches = [LayerCache(f"model.layers.{number}.attn", PAGE_BYTES) for number in range(NUM_LAYERS)]
    plan = plan_cache(caches, group_size=2)
    tail_bytes = EXCHANGE_BYTES + mmap.PAGESIZE
    assert on_run.num_gpu_blocks == min(fit_num_blocks(plan, rank, KV_BYTES, tail_bytes) for rank in range(2))
    assert off_run.num_gpu_blocks == KV_BYTES // (NUM_LAYERS * PAGE_BYTES)
    assert f"KV cache size: {on_run.num_tokens:,} tokens" in on_run.log
    assert f"KV cache size: {off_run.num_tokens:,} tokens" in off_run.log


def test_the_cache_allocation_stays_within_the_available_bytes(on_run: EngineRun) -> None:
    for report in on_run.actions[ON_REPORT]:
        assert report["planned_bytes"] == report["allocated_bytes"] <= report["available_bytes"] == KV_BYTES
    for worker in on_run.actions[ON_WORKER]:
        assert worker["cache_bytes"] <= KV_BYTES


def test_every_layer_is_moved_exactly_once_in_a_step_with_history(on_run: EngineRun) -> None:
    for report in on_run.actions[ON_REPORT]:
        counters = report["counters"]
        assert counters["steps_with_history"] >= NUM_GENERATED - 1
        assert counters["transfers"] == counters["steps_with_history"] * NUM_LAYERS
        # Up to four requests of up to 16 blocks; test_transfers counts them exactly.
        assert counters["transferred_bytes"] == counters["transferred_blocks"] * PAGE_BYTES
        assert 0 < counters["transferred_blocks"] <= counters["transfers"] * 4 * 16


def test_nothing_is_moved_in_steps_without_history(on_run: EngineRun) -> None:
    before, after = on_run.actions[ON_REPORT], on_run.actions[ON_REPORT_AFTER_PREFILL]
    for old, new in zip(before, after, strict=True):
        assert new["counters"]["steps"] > old["counters"]["steps"]
        assert new["counters"]["transfers"] == old["counters"]["transfers"]


def test_all_ranks_count_the_same_transfers(on_run: EngineRun) -> None:
    counts = {report["counters"]["transfers"] for report in on_run.actions[ON_REPORT_AFTER_AGAIN]}
    assert len(counts) == 1


def test_each_rank_owns_half_of_the_layers(on_run: EngineRun) -> None:
    assert [report["owned_layers"] for report in on_run.actions[ON_REPORT]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_start_up_log_says_what_is_kept_where(on_run: EngineRun) -> None:
    for line in (
        "KVPP is on: group size 2",
        "KVPP group rank 0 of 2",
        "owned layers     0–3 (4 of 8)",
        "bytes per block",
    ):
        assert line in on_run.log
    assert on_run.log.count("owned layers") == 1


def test_the_workers_are_attached_once_each(on_run: EngineRun) -> None:
    for worker in on_run.actions[ON_WORKER]:
        assert worker["wrapped_layers"] == NUM_LAYERS
        assert worker["is_runner_wrapped"]
        assert worker["num_model_hooks"] == 1


def test_with_kvpp_off_the_workers_are_vllms_own(off_run: EngineRun, on_run: EngineRun) -> None:
    for off_worker, on_worker in zip(off_run.actions[OFF_WORKER], on_run.actions[ON_WORKER], strict=True):
        assert off_worker["class"] == "CPUWorker"
        assert off_worker["wrapped_layers"] == off_worker["num_model_hooks"] == 0
        assert not off_worker["is_runner_wrapped"]
        # KVPP adds one group for the bundles, one for decode queries, and one for the checks at start-up.
        assert on_worker["num_process_groups"] - off_worker["num_process_groups"] == 3
    assert "KVPP" not in off_run.log.replace("enable_kvpp", "")
    assert off_run.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


def test_with_kvpp_off_only_the_configuration_hook_is_loaded(off_run: EngineRun) -> None:
    allowed = {
        "vllm_kvpp",
        "vllm_kvpp.config",
        "vllm_kvpp.deployment",
        "vllm_kvpp.errors",
        "vllm_kvpp.selection",
        "vllm_kvpp.vllm_seam",
        "vllm_kvpp.vllm_seam.platform_hook",
        "vllm_kvpp.vllm_seam.plugin",
        "vllm_kvpp.vllm_seam.symbols",
    }
    for worker in off_run.actions[OFF_WORKER]:
        assert set(worker["modules"]) <= allowed
