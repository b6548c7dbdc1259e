"""Decode at the owner, TP 2: equal answers to the bit, not a byte of history moved, and wrong answers without it."""

from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineRun, run_engine, write_plugin
from recall_runs import (
    NUM_GENERATED,
    OFF_WORKLOAD,
    ON_AFTER_OWNER,
    ON_ALL_LAYERS_HERE,
    ON_BEFORE_OWNER,
    ON_LAST_LAYER_HERE,
    ON_OWNER,
    ON_OWNER_RESTORED,
    RECALL_ENGINE,
    REPORT,
    Marking,
    counted,
    kvpp,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_LAYERS = 8
# Heads of a rank x element.
HEAD_BYTES = 2 * 4
QUERY_WIDTH, OUTPUT_WIDTH = 576, 512


@pytest.mark.proves("`kvpp.decode` owner, transfer")
@pytest.mark.parametrize("index", [ON_OWNER, ON_OWNER_RESTORED], ids=["owner", "restored"])
def test_answers_equal_those_without_kvpp_bit_for_bit(off_run: EngineRun, on_run: EngineRun, index: int) -> None:
    assert on_run.answers(index) == off_run.answers(OFF_WORKLOAD)


def test_the_recall_answers_are_right(on_run: EngineRun, marking: Marking) -> None:
    assert marking.share_of_right_answers(on_run, ON_OWNER) == 1.0


def test_words_go_wrong_when_every_rank_attends_to_what_it_holds(on_run: EngineRun, marking: Marking) -> None:
    assert marking.share_of_right_words(on_run, ON_ALL_LAYERS_HERE) < 0.6


def test_logprobs_differ_when_one_layer_does_not_attend_at_its_owner(off_run: EngineRun, on_run: EngineRun) -> None:
    assert on_run.answers(ON_LAST_LAYER_HERE) != off_run.answers(OFF_WORKLOAD)


def test_no_history_is_moved_in_decode(on_run: EngineRun) -> None:
    # Prompts are computed in one go here, so only decode has history.
    for counter in ("transfers", "transferred_bytes", "steps_with_transfers", "steps_in_place"):
        assert counted(on_run, ON_BEFORE_OWNER, ON_AFTER_OWNER, counter) == [0, 0]
    at_owner = counted(on_run, ON_BEFORE_OWNER, ON_AFTER_OWNER, "steps_at_owner")
    assert at_owner == counted(on_run, ON_BEFORE_OWNER, ON_AFTER_OWNER, "steps_with_history")
    assert min(at_owner) >= NUM_GENERATED - 1


def test_queries_and_outputs_take_the_bytes_of_the_formula(on_run: EngineRun, workload: dict[str, Any]) -> None:
    # Each request but its first token; of each row, one rank's heads travel to the owner and back.
    num_rows = sum(length - 1 for length in workload["lengths"])
    for counter, width in (("query_bytes", QUERY_WIDTH), ("output_bytes", OUTPUT_WIDTH)):
        expected = num_rows * NUM_LAYERS * HEAD_BYTES * width
        assert counted(on_run, ON_BEFORE_OWNER, ON_AFTER_OWNER, counter) == [expected] * 2


def test_the_log_and_the_report_say_where_decode_attends(on_run: EngineRun) -> None:
    assert "decode           at the owner; queries and outputs through " in on_run.log
    for report in on_run.actions[ON_AFTER_OWNER]:
        assert report["decode"] == "owner"
        assert report["exchange_bytes"] > 0


@pytest.fixture(scope="module")
def gloo_run(workload: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    options = kvpp(True, decode="owner", transport="broadcast")
    engine = {**RECALL_ENGINE, "tensor_parallel_size": 2, "additional_config": options}
    return run_engine(engine, [workload, REPORT], tmp_path_factory.mktemp("gloo"), decode="owner")


@pytest.mark.proves("transfers by broadcast")
def test_answers_by_gather_and_scatter_equal_those_without_kvpp_bit_for_bit(
    off_run: EngineRun, gloo_run: EngineRun
) -> None:
    assert gloo_run.answers(0) == off_run.answers(OFF_WORKLOAD)
    for report in gloo_run.actions[1]:
        assert report["counters"]["steps_at_owner"] == report["counters"]["steps_with_history"] > 0
        assert report["counters"]["transferred_bytes"] == 0


def _run_with_unknown_backend(decode: str, workload: dict[str, Any], folder: Path) -> EngineRun:
    write_plugin(folder, "unknown_backend")
    engine = {**RECALL_ENGINE, "tensor_parallel_size": 2, "additional_config": kvpp(True, decode=decode)}
    return run_engine(engine, [workload, REPORT], folder)


def test_owner_decode_is_refused_where_the_backend_is_not_known_to_attend_all_heads(
    workload: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="the engine failed") as failure:
        _run_with_unknown_backend("owner", workload, tmp_path)
    for sentence in (
        "Decode tokens cannot attend at the owner. (attention backend SOME_MLA: KVPP does not know it;",
        "set kvpp.decode to auto or transfer, or choose one of the attention backends CPU_MLA, TRITON_MLA",
    ):
        assert sentence in str(failure.value)


def test_auto_moves_history_where_the_backend_is_not_known_and_says_so_once(
    off_run: EngineRun, workload: dict[str, Any], tmp_path: Path
) -> None:
    run = _run_with_unknown_backend("auto", workload, tmp_path)
    said = "Decode moves history: its tokens cannot attend at the owner (attention backend SOME_MLA: KVPP does not know"
    assert 1 <= run.log.count(said) <= 2
    assert run.answers(0) == off_run.answers(OFF_WORKLOAD)
    for report in run.actions[1]:
        assert report["decode"] == "transfer"
        assert report["exchange_bytes"] == report["counters"]["steps_at_owner"] == 0
