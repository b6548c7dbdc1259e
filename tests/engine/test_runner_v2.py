"""Model runner V2, TP 2: KVPP on against off, with chunked prefill, prefix caching, kernel warm-up and MTP.

Its kernels run in Triton's interpreter; see `reference/`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_mtp_checkpoint
from engine_process import EngineRun, run_engine
from hugging_face import largest_logprob_error
from recall_runs import RECALL_ENGINE, REPORT, Marking, kvpp_every_way, rpc

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_LAYERS = 8
MTP_NUM_LAYERS = 6
BLOCK_SIZE = 16
PAGE_BYTES = BLOCK_SIZE * 576 * 4  # block size x latent width x float32
CHUNK = 32
WARM_UP, FIRST, AGAIN, REPORTED, SABOTAGED = 0, 1, 2, 3, 5
AT_OWNER, REPORTED_AT_OWNER, ATTENDED_HERE = 8, 9, 11
IN_PLACE, REPORTED_IN_PLACE, READ_HERE = 14, 15, 17


def _run(
    engine: dict[str, Any], folder: Path, is_on: bool, actions: list[dict[str, Any]], parts: list[str]
) -> EngineRun:
    engine = {**engine, "tensor_parallel_size": 2, "additional_config": kvpp_every_way(is_on)}
    return run_engine(engine, actions, folder, reference=["runner_v2", *parts])


@pytest.fixture(scope="module")
def runs(workload: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, EngineRun]:
    engine = {
        **RECALL_ENGINE,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": CHUNK,
    }
    actions = [rpc("warm_up_runner_v2"), workload, workload]
    sabotage = [
        *(REPORT, rpc("sabotage_transfers", []), workload),
        *(rpc("restore_transfers"), rpc("set_decode", "owner"), workload, REPORT),
        *(rpc("sabotage_decode"), workload, rpc("restore_decode")),
        *(rpc("set_decode", "in_place"), workload, REPORT, rpc("sabotage_decode"), workload),
    ]
    return {
        is_on: _run(engine, tmp_path_factory.mktemp("v2"), is_on, actions + sabotage * is_on, ["chunked_prefill"])
        for is_on in (False, True)
    }


def test_the_runner_is_v2(runs: dict[bool, EngineRun]) -> None:
    assert all("Using V2 Model Runner" in run.log for run in runs.values())


@pytest.mark.proves("model runner V2", "chunked prefill", "prefix caching")
@pytest.mark.parametrize("index", [FIRST, AGAIN], ids=["chunked prefill", "prefix hits"])
def test_token_ids_and_logprobs_equal_those_without_kvpp_bit_for_bit(runs: dict[bool, EngineRun], index: int) -> None:
    assert runs[True].answers(index) == runs[False].answers(index)


def test_answers_without_kvpp_are_those_of_the_hugging_face_model(
    runs: dict[bool, EngineRun], workload: dict[str, Any]
) -> None:
    for index in (FIRST, AGAIN):
        assert largest_logprob_error(CHECKPOINT_DIR, workload["prompts"], runs[False].answers(index)) < 1e-4


def test_the_recall_answers_are_right(runs: dict[bool, EngineRun], marking: Marking) -> None:
    assert marking.share_of_right_answers(runs[True], FIRST) == 1.0
    assert marking.share_of_right_answers(runs[True], AGAIN) == 1.0


def test_recited_words_go_wrong_when_nothing_is_moved(runs: dict[bool, EngineRun], marking: Marking) -> None:
    assert runs[True].answers(SABOTAGED) != runs[False].answers(AGAIN)
    assert marking.share_of_right_words(runs[True], SABOTAGED) < 0.6


@pytest.mark.proves("model runner V2")
def test_with_decode_at_the_owner_answers_equal_those_without_kvpp_bit_for_bit(runs: dict[bool, EngineRun]) -> None:
    assert runs[True].answers(AT_OWNER) == runs[False].answers(AGAIN)
    for before, after in zip(runs[True].actions[REPORTED], runs[True].actions[REPORTED_AT_OWNER], strict=True):
        assert after["counters"]["steps_at_owner"] > before["counters"]["steps_at_owner"]


@pytest.mark.proves("model runner V2")
def test_with_decode_in_place_answers_equal_those_without_kvpp_bit_for_bit(runs: dict[bool, EngineRun]) -> None:
    assert runs[True].answers(IN_PLACE) == runs[False].answers(AGAIN)
    for before, after in zip(runs[True].actions[REPORTED_AT_OWNER], runs[True].actions[REPORTED_IN_PLACE], strict=True):
        assert after["counters"]["steps_in_place"] > before["counters"]["steps_in_place"]


@pytest.mark.parametrize("index", [ATTENDED_HERE, READ_HERE], ids=["owner", "in_place"])
def test_answers_differ_when_every_rank_attends_to_what_it_holds(runs: dict[bool, EngineRun], index: int) -> None:
    assert runs[True].answers(index) != runs[False].answers(AGAIN)


def test_prompts_are_prefilled_in_chunks_and_then_found_in_the_cache(
    runs: dict[bool, EngineRun], workload: dict[str, Any]
) -> None:
    num_tokens = [len(prompt) for prompt in workload["prompts"]]
    # A prompt's last token is always computed.
    whole_blocks = [(count - 1) // BLOCK_SIZE * BLOCK_SIZE for count in num_tokens]
    assert max(num_tokens) > CHUNK
    assert [answer.num_cached_tokens for answer in runs[True].answers(AGAIN)] == whole_blocks


def test_every_layer_is_moved_exactly_once_in_a_step_with_history(runs: dict[bool, EngineRun]) -> None:
    for report in runs[True].actions[REPORTED]:
        counters = report["counters"]
        assert counters["transfers"] == counters["steps_with_history"] * NUM_LAYERS > 0


def test_a_dummy_run_is_no_step_and_made_up_requests_are_steps_alike_on_every_rank(runs: dict[bool, EngineRun]) -> None:
    before, after_dummy_run, after_warm_up = runs[True].actions[WARM_UP][0]
    assert after_warm_up > after_dummy_run == before
    assert runs[True].actions[WARM_UP][1] == [before, after_dummy_run, after_warm_up]


def _mtp_workload() -> dict[str, Any]:
    generator = random.Random(7)
    prompts = [[generator.randrange(2, 512) for _ in range(length)] for length in (20, 33, 48)]
    requests = [{"prompt": prompt, "max_tokens": 10 + 2 * index} for index, prompt in enumerate(prompts)]
    return {"kind": "serve", "name": "drafts", "requests": requests}


@pytest.fixture(scope="module")
def mtp_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, EngineRun]:
    model = write_mtp_checkpoint(tmp_path_factory.mktemp("mtp"), num_layers=MTP_NUM_LAYERS)
    engine = {
        **RECALL_ENGINE,
        "model": str(model),
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    }
    actions = [_mtp_workload()]
    sabotage = [
        *(REPORT, rpc("sabotage_transfers", []), _mtp_workload()),
        *(rpc("restore_transfers"), rpc("set_decode", "owner"), REPORT, _mtp_workload(), REPORT),
        *(rpc("set_decode", "transfer"), rpc("forget_drafts"), _mtp_workload()),
    ]
    return {
        is_on: _run(engine, tmp_path_factory.mktemp("v2"), is_on, actions + sabotage * is_on, [])
        for is_on in (False, True)
    }


@pytest.mark.proves("model runner V2", "MTP")
def test_steps_and_answers_with_drafts_equal_those_without_kvpp_bit_for_bit(mtp_runs: dict[bool, EngineRun]) -> None:
    on, off = mtp_runs[True].actions[0], mtp_runs[False].actions[0]
    assert on["answers"] == off["answers"]
    # Accepted drafts save steps, so as many were accepted.
    assert on["schedule"] == off["schedule"]
    assert len(on["schedule"]) < 14


def test_answers_with_drafts_differ_when_target_layers_are_not_moved(mtp_runs: dict[bool, EngineRun]) -> None:
    assert mtp_runs[True].answers(3) != mtp_runs[False].answers(0)


def test_other_drafts_are_accepted_when_a_rank_loses_its_draft_cache(mtp_runs: dict[bool, EngineRun]) -> None:
    assert mtp_runs[True].actions[11]["schedule"] != mtp_runs[False].actions[0]["schedule"]


@pytest.mark.proves("model runner V2", "MTP")
def test_where_the_backend_verifies_drafts_as_it_does_prompts_their_history_is_moved(
    mtp_runs: dict[bool, EngineRun],
) -> None:
    on, off = mtp_runs[True].actions[7], mtp_runs[False].actions[0]
    assert on["answers"] == off["answers"]
    assert on["schedule"] == off["schedule"]
    for before, after in zip(mtp_runs[True].actions[6], mtp_runs[True].actions[8], strict=True):
        assert after["counters"]["steps_with_transfers"] > before["counters"]["steps_with_transfers"]
        assert after["counters"]["steps_at_owner"] == 0


def test_draft_layers_of_the_speculator_own_no_layer(mtp_runs: dict[bool, EngineRun]) -> None:
    assert "Using V2 Model Runner" in mtp_runs[True].log
    for report in mtp_runs[True].actions[1]:
        assert report["num_target_layers"] == MTP_NUM_LAYERS
        assert report["bytes_per_block"]["draft"] == PAGE_BYTES
        assert report["counters"]["transfers"] == MTP_NUM_LAYERS * report["counters"]["steps_with_history"] > 0
