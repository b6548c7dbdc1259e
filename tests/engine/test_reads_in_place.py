"""Decode that reads the owner's memory in place, TP 2: equal answers to the bit, nothing moved, and wrong otherwise."""

from typing import Any

import pytest
from engine_process import EngineRun, run_engine
from recall_runs import (
    NUM_GENERATED,
    OFF_WORKLOAD,
    ON_AFTER_AUTO,
    ON_AFTER_IN_PLACE,
    ON_AFTER_OWNER,
    ON_ALL_LAYERS_READ_HERE,
    ON_AUTO,
    ON_BEFORE_IN_PLACE,
    ON_IN_PLACE,
    ON_IN_PLACE_RESTORED,
    ON_LAST_LAYER_READ_HERE,
    RECALL_ENGINE,
    Marking,
    counted,
    kvpp,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MOVED = ("transfers", "transferred_bytes", "steps_with_transfers", "exchanges", "query_bytes", "output_bytes")


@pytest.mark.proves("`kvpp.decode` in_place, auto")
@pytest.mark.parametrize("index", [ON_IN_PLACE, ON_AUTO, ON_IN_PLACE_RESTORED], ids=["in_place", "auto", "restored"])
def test_answers_equal_those_without_kvpp_bit_for_bit(off_run: EngineRun, on_run: EngineRun, index: int) -> None:
    assert on_run.answers(index) == off_run.answers(OFF_WORKLOAD)


def test_the_recall_answers_are_right(on_run: EngineRun, marking: Marking) -> None:
    assert marking.share_of_right_answers(on_run, ON_IN_PLACE) == 1.0


def test_words_go_wrong_when_every_rank_reads_what_it_holds_itself(on_run: EngineRun, marking: Marking) -> None:
    assert marking.share_of_right_words(on_run, ON_ALL_LAYERS_READ_HERE) < 0.6


def test_logprobs_differ_when_one_layer_is_not_read_at_its_owner(off_run: EngineRun, on_run: EngineRun) -> None:
    assert on_run.answers(ON_LAST_LAYER_READ_HERE) != off_run.answers(OFF_WORKLOAD)


@pytest.mark.parametrize(
    ("before", "after"),
    [(ON_BEFORE_IN_PLACE, ON_AFTER_IN_PLACE), (ON_AFTER_OWNER, ON_AFTER_AUTO)],
    ids=["in_place", "auto"],
)
def test_neither_history_nor_queries_are_moved_in_decode(on_run: EngineRun, before: int, after: int) -> None:
    # Prompts are computed in one go here, so only decode has history.
    assert {name: counted(on_run, before, after, name) for name in MOVED} == {name: [0, 0] for name in MOVED}
    in_place = counted(on_run, before, after, "steps_in_place")
    assert in_place == counted(on_run, before, after, "steps_with_history")
    assert min(in_place) >= NUM_GENERATED - 1


@pytest.mark.proves("`kvpp.decode` in_place, auto")
def test_with_the_switch_alone_decode_reads_in_place_and_keeps_no_memory_for_queries(
    off_run: EngineRun, default_run: EngineRun
) -> None:
    assert default_run.answers(0) == off_run.answers(OFF_WORKLOAD)
    assert "decode           in place: every rank reads the owners' memory" in default_run.log
    for report in default_run.actions[1]:
        assert (report["decode"], report["exchange_bytes"]) == ("in_place", 0)
        assert report["counters"]["steps_in_place"] == report["counters"]["steps_with_history"] > 0
        assert report["counters"]["transferred_bytes"] == 0


def test_in_place_is_refused_with_a_transport_by_which_ranks_do_not_share_memory(
    workload: dict[str, Any], tmp_path: Any
) -> None:
    options = kvpp(True, decode="in_place", transport="broadcast")
    engine = {**RECALL_ENGINE, "tensor_parallel_size": 2, "additional_config": options}
    with pytest.raises(AssertionError, match="the engine failed") as failure:
        run_engine(engine, [workload], tmp_path)
    assert "kvpp.decode is in_place, but with kvpp.transport broadcast no rank reads another's memory" in str(
        failure.value
    )
