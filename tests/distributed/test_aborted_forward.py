"""A forward that raises on every rank leaves nothing behind: no hang, and the next step is right (R-RUN-5)."""

from collections.abc import Callable

import pytest
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario, calls_for, find_problems, run_past_hooks
from multirank.schedules import NUM_BLOCKS, Steps, decode
from multirank.setups import DECODE_SETUPS, SETUPS
from multirank.toy_model import make_layers
from multirank.toy_scheduler import Abort, ToyScheduler

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

NUM_LAYERS = 6
ABORTS = [Abort(index, has_waited) for index in (0, 1, 3, NUM_LAYERS - 1) for has_waited in (False, True)]


def abort_prefill_and_decode(abort: Abort) -> Steps:
    """Forwards without and with history abort and are repeated."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(10))
    for num_tokens in (10, 1, 1):
        scheduler.step({"a": num_tokens}, abort)
        scheduler.step({"a": num_tokens})
    return tuple(scheduler.steps)


def abort_then_prefill(abort: Abort) -> Steps:
    """A decode aborts, twice in a row; then a forward without history uses the scratch buffers before it goes on."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(10))
    scheduler.step({"a": 10})
    scheduler.step({"a": 1}, abort)
    scheduler.step({"a": 1}, abort)
    scheduler.add("b", range(100, 111))
    scheduler.step({"b": 11})
    scheduler.step({"a": 1, "b": 1})
    return tuple(scheduler.steps)


@pytest.mark.parametrize("schedule", [abort_prefill_and_decode, abort_then_prefill])
@pytest.mark.parametrize(
    ("setup_name", "group_ranks"),
    [
        ("full_strict", (2, 3)),
        ("runs", (0, 1, 2, 3)),
        ("staged_strict", (1, 2, 3)),
        ("peers_strict", (1, 2, 3)),
        ("peers_uneven", (0, 1, 2, 3)),
        ("peers_owner", (1, 2, 3)),
        ("peers_in_place", (1, 2, 3)),
        ("peers_in_place_uneven", (0, 1, 2, 3)),
    ],
)
@pytest.mark.parametrize("abort", ABORTS, ids=str)
def test_steps_after_an_aborted_forward_are_right(
    four_ranks: RankProcesses,
    group_ranks: tuple[int, ...],
    schedule: Callable[[Abort], Steps],
    setup_name: str,
    abort: Abort,
) -> None:
    scenario = Scenario(make_layers(NUM_LAYERS), schedule(abort), group_ranks, (SETUPS | DECODE_SETUPS)[setup_name])
    assert find_problems(four_ranks.run(calls_for(scenario))) == []


@pytest.mark.parametrize("setup_name", ["full", "staged", "peers"])
def test_a_model_that_passes_a_layer_by_gets_an_error_on_every_rank_and_goes_on_right(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup_name: str
) -> None:
    scenario = Scenario(make_layers(3, with_indexer={1}), decode()[:3], group_ranks, SETUPS[setup_name])
    answers = four_ranks.run(calls_for(scenario, run_past_hooks))
    assert find_problems([report for _, report in answers]) == []
    for errors, _ in answers:
        for error, passed_by in zip(errors, [0, 1, 2] * 2, strict=True):
            assert f"model.layers.{passed_by}.self_attn.attn" in error
            assert "reached out of order" in error or "did not wait for its cache" in error
