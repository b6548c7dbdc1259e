"""A rank that is gone or stuck ends the others' step with an error that says which transfer, in time."""

import re
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
from multirank.lost_ranks import (
    EXIT_CODE,
    Loss,
    abort_alone,
    be_killed_before_meeting,
    be_killed_between_transfers,
    disagree,
    end_during_transfer,
    sleep_through_step,
    survive,
)
from multirank.rank import Call
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario
from multirank.schedules import decode
from multirank.setups import FULL, PEERS, STAGED, TransferSetup
from multirank.toy_model import make_layers
from multirank.toy_scheduler import Abort

from vllm_kvpp.selection import BlockRuns

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

LIMIT_SECONDS = 3.0
# Two busy cores may start a rank late; what counts is that it ends, not when to the second.
SLACK_SECONDS = 20.0
LONG_LIMIT_SECONDS = 35.0
STEPS = decode()[:3]
# 32 MiB a layer: more than sockets hold, so that a transfer cannot end before its receiver has read it.
BIG_LAYERS = {"layers": make_layers(3, row_bytes=4096), "num_blocks": 2048}
STUCK = {sleep_through_step, abort_alone}


def run_with_loss(
    scenario: Scenario, lost_rank: int, lost_call: Call, group_limit_seconds: float = LIMIT_SECONDS
) -> list[Loss]:
    """Run in a world of its own, one rank lost; return what the others got."""
    size = len(scenario.group_ranks)
    calls = {world_rank: Call(survive, (scenario,)) for world_rank in range(size)} | {lost_rank: lost_call}
    with RankProcesses(size, groups=[scenario.group_ranks], timeout_seconds=group_limit_seconds) as processes:
        stuck_ranks = frozenset({lost_rank}) if lost_call.function in STUCK else frozenset()
        outcomes = processes.outcomes(calls, limit_seconds=40, stuck_ranks=stuck_ranks)
    assert [outcome.traceback for outcome in outcomes if outcome.traceback] == []
    assert {outcome.exit_code for outcome in outcomes} <= {None, EXIT_CODE, -signal.SIGKILL}
    return [outcome.value for outcome in outcomes if outcome.world_rank != lost_rank]


def names_transfer(loss: Loss, owner_by_layer: dict[int, int], group_size: int) -> bool:
    """Whether the message names a layer with its owner, and the group."""
    group = f"in the KVPP group of ranks {list(range(group_size))}"
    return any(
        f"The transfer of model.layers.{layer}.self_attn.attn from owner rank {owner} failed {group}" in loss.message
        for layer, owner in owner_by_layer.items()
    )


@pytest.mark.parametrize("lost_rank", [0, 1], ids=["owner", "receiver"])
def test_a_rank_that_ends_during_a_transfer_is_noticed_by_the_other(lost_rank: int) -> None:
    scenario = Scenario(steps=STEPS, group_ranks=(0, 1), **BIG_LAYERS)
    (loss,) = run_with_loss(scenario, lost_rank, Call(end_during_transfer, (scenario,)))
    assert names_transfer(loss, {0: 0, 1: 0, 2: 1}, group_size=2), loss.message
    assert "A rank of the group is gone or stuck" in loss.message
    assert loss.seconds < LIMIT_SECONDS + SLACK_SECONDS


def test_a_rank_that_ends_during_a_transfer_is_noticed_by_all_others() -> None:
    scenario = Scenario(steps=STEPS, group_ranks=(0, 1, 2), **BIG_LAYERS)
    losses = run_with_loss(scenario, 1, Call(end_during_transfer, (scenario,)))
    assert len(losses) == 2
    for loss in losses:
        assert names_transfer(loss, {0: 0, 1: 1, 2: 2}, group_size=3), loss.message
        assert loss.seconds < LIMIT_SECONDS + SLACK_SECONDS


@pytest.mark.parametrize("point", [be_killed_before_meeting, be_killed_between_transfers])
@pytest.mark.parametrize("lost_rank", [0, 1, 2])
def test_peers_of_a_killed_rank_notice_at_once(point: Callable[..., None], lost_rank: int) -> None:
    # Every survivor owns one that the lost rank has not read.
    scenario = Scenario(make_layers(7), STEPS, (0, 1, 2), PEERS)
    losses = run_with_loss(scenario, lost_rank, Call(point, (scenario,)), group_limit_seconds=LONG_LIMIT_SECONDS)
    assert len(losses) == 2
    for loss in losses:
        assert names_transfer(loss, {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}, group_size=3), loss.message
        assert "is gone. A rank of the group is gone or stuck" in loss.message
        assert loss.seconds < SLACK_SECONDS < LONG_LIMIT_SECONDS
    # Whoever notices first says who it was; the other may notice that one first.
    assert any(f"group rank {lost_rank} is gone" in loss.message for loss in losses)


def test_peers_that_would_move_different_blocks_get_an_error_on_every_rank() -> None:
    scenario = Scenario(make_layers(6), STEPS, (0, 1, 2), PEERS)
    history = BlockRuns.of(STEPS[-1].active_blocks)
    other = BlockRuns.of([*history, 11])
    calls = {rank: Call(disagree, (scenario, other if rank == 1 else history)) for rank in range(3)}
    with RankProcesses(3, groups=[(0, 1, 2)], timeout_seconds=LONG_LIMIT_SECONDS) as processes:
        errors = processes.run(calls)
    # The odd one differs from both others, and may hear of either first.
    odd_ranks = {0: "1", 1: "[02]", 2: "1"}
    for rank, error in enumerate(errors):
        assert re.search(f"group rank {odd_ranks[rank]} does not move the same in this step", error), error
        assert "The transfer of model.layers.0.self_attn.attn from owner rank 0 failed" in error


@pytest.mark.parametrize(
    ("setup", "lost_rank"),
    [(FULL, 0), (FULL, 1), (STAGED, 1), (PEERS, 0), (PEERS, 1)],
    ids=["full-owner", "full-receiver", "staged-receiver", "peers-owner", "peers-receiver"],
)
def test_a_transfer_that_a_rank_never_starts_ends_at_the_limit(lost_rank: int, setup: TransferSetup) -> None:
    scenario = Scenario(make_layers(6), STEPS, (0, 1), setup)
    (loss,) = run_with_loss(scenario, lost_rank, Call(sleep_through_step, (scenario,)))
    assert names_transfer(loss, {0: 0}, group_size=2), loss.message
    assert "raise kvpp.transfer_timeout_seconds" in loss.message
    assert LIMIT_SECONDS <= loss.seconds < LIMIT_SECONDS + SLACK_SECONDS


def test_a_transfer_ends_at_its_own_limit_where_the_process_group_has_a_longer_one() -> None:
    scenario = Scenario(make_layers(6), STEPS, (0, 1), limit_seconds=LIMIT_SECONDS)
    (loss,) = run_with_loss(scenario, 1, Call(sleep_through_step, (scenario,)), group_limit_seconds=20)
    assert names_transfer(loss, {0: 0}, group_size=2), loss.message
    assert f"not finished after {LIMIT_SECONDS:g} s" in loss.message
    assert LIMIT_SECONDS <= loss.seconds < LIMIT_SECONDS + SLACK_SECONDS


@pytest.mark.parametrize(
    ("setup", "aborted_index", "owner_by_late_layer"),
    [
        # The lost rank has started the next layer before it raised; the one behind that it never starts.
        pytest.param(FULL, 2, {4: 1}, id="full"),
        # A receiver needs nothing of the owner after the meeting: what stands still is a layer of its own.
        pytest.param(PEERS, 0, {2: 0}, id="peers"),
    ],
)
def test_a_forward_that_aborts_on_one_rank_alone_ends_the_others_at_the_limit(
    setup: TransferSetup, aborted_index: int, owner_by_late_layer: dict[int, int]
) -> None:
    scenario = Scenario(make_layers(6), STEPS, (0, 1), setup)
    abort = replace(STEPS[-1], abort=Abort(target_index=aborted_index, has_waited=True))
    (loss,) = run_with_loss(scenario, 1, Call(abort_alone, (scenario, abort)))
    assert names_transfer(loss, owner_by_late_layer, group_size=2), loss.message
    assert loss.seconds < LIMIT_SECONDS + SLACK_SECONDS
