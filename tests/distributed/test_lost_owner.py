"""A rank that is gone or stuck while others attend to its memory ends their step with an error that says so in time."""

import re
import signal

import pytest
from multirank.lost_ranks import Loss, be_lost_in_exchange, be_lost_in_place, survive
from multirank.rank import Call
from multirank.rank_processes import RankProcesses
from multirank.reads import late_owner
from multirank.scenarios import Scenario
from multirank.schedules import decode
from multirank.setups import AT_OWNER, IN_PLACE, PEERS, STAGED, TransferSetup
from multirank.toy_model import make_layers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

LIMIT_SECONDS = 3.0
# As in test_lost_rank: two busy cores may start a rank late.
SLACK_SECONDS = 20.0
LONG_LIMIT_SECONDS = 35.0
GROUP_RANKS = (0, 1, 2)
OWNER_BY_LAYER = (0, 0, 0, 1, 1, 2, 2)
PEERS_AT_OWNER, GLOO_AT_OWNER = PEERS.with_decode(AT_OWNER), STAGED.with_decode(AT_OWNER)
PEERS_IN_PLACE = PEERS.with_decode(IN_PLACE)
# Those of the two steps that read in place.
FIRST_STEP, LAST_STEP = 0, 1


def run_with_loss(
    setup: TransferSetup, lost_rank: int, call: str, layer_index: int, *, is_stuck: bool, group_limit_seconds: float
) -> list[Loss]:
    """Lose one of three ranks as a layer's gather or scatter begins; return what the others got."""
    scenario = make_scenario(setup)
    lost = Call(be_lost_in_exchange, (scenario, call, layer_index, is_stuck))
    return run_beside(scenario, lost_rank, lost, is_stuck=is_stuck, group_limit_seconds=group_limit_seconds)


def run_with_loss_in_place(
    lost_rank: int,
    step: int,
    call: str,
    layer_index: int,
    *,
    is_stuck: bool,
    group_limit_seconds: float,
    setup: TransferSetup = PEERS_IN_PLACE,
) -> list[Loss]:
    """Lose one of three ranks before it tells that a layer is written, or as it would read it."""
    scenario = make_scenario(setup)
    lost = Call(be_lost_in_place, (scenario, step, call, layer_index, is_stuck))
    return run_beside(scenario, lost_rank, lost, is_stuck=is_stuck, group_limit_seconds=group_limit_seconds)


def make_scenario(setup: TransferSetup) -> Scenario:
    """A prefill and two decodes."""
    return Scenario(make_layers(len(OWNER_BY_LAYER)), decode()[:3], GROUP_RANKS, setup)


def run_beside(
    scenario: Scenario, lost_rank: int, lost: Call, *, is_stuck: bool, group_limit_seconds: float
) -> list[Loss]:
    """Run beside a rank that is lost; return what the others got."""
    calls = {rank: Call(survive, (scenario,)) for rank in GROUP_RANKS} | {lost_rank: lost}
    with RankProcesses(3, groups=[GROUP_RANKS], timeout_seconds=group_limit_seconds) as processes:
        stuck_ranks = frozenset({lost_rank} if is_stuck else ())
        outcomes = processes.outcomes(calls, limit_seconds=40, stuck_ranks=stuck_ranks)
    assert [outcome.traceback for outcome in outcomes if outcome.traceback] == []
    assert {outcome.exit_code for outcome in outcomes} == ({None} if is_stuck else {None, -signal.SIGKILL})
    losses = [outcome.value for outcome in outcomes if outcome.world_rank != lost_rank]
    assert len(losses) == 2
    return losses


def names_exchange(loss: Loss, layer: int) -> bool:
    """Whether the message names the layer with its owner, the group, and what to look at."""
    begin = (
        f"The exchange of decode queries with the owner of model.layers.{layer}.self_attn.attn, rank "
        f"{OWNER_BY_LAYER[layer]}, failed in the KVPP group of ranks [0, 1, 2]: "
    )
    return loss.message.startswith(begin) and "A rank of the group is gone or stuck: see its log" in loss.message


@pytest.mark.parametrize(
    ("lost_rank", "call", "layer_index"),
    [(1, "gather", 0), (1, "scatter", 3), (0, "gather", 6)],
    ids=["peer_in_gather", "owner_while_it_attends", "peer_in_last_gather"],
)
def test_peers_of_a_rank_killed_in_an_exchange_notice_at_once(lost_rank: int, call: str, layer_index: int) -> None:
    losses = run_with_loss(
        PEERS_AT_OWNER, lost_rank, call, layer_index, is_stuck=False, group_limit_seconds=LONG_LIMIT_SECONDS
    )
    for loss in losses:
        assert names_exchange(loss, layer_index), loss.message
        assert "is gone. A rank" in loss.message
        assert loss.seconds < SLACK_SECONDS < LONG_LIMIT_SECONDS
    # Whoever notices first says who it was; the other may notice that one first.
    assert any(f"group rank {lost_rank} is gone" in loss.message for loss in losses)


@pytest.mark.parametrize(
    ("lost_rank", "call", "layer_index"),
    [(1, "gather", 0), (1, "scatter", 3)],
    ids=["peer_in_gather", "owner_while_it_attends"],
)
def test_ranks_that_exchange_by_collectives_notice_a_killed_one_within_the_limit(
    lost_rank: int, call: str, layer_index: int
) -> None:
    losses = run_with_loss(
        GLOO_AT_OWNER, lost_rank, call, layer_index, is_stuck=False, group_limit_seconds=LIMIT_SECONDS
    )
    for loss in losses:
        assert names_exchange(loss, layer_index), loss.message
        assert loss.seconds < LIMIT_SECONDS + SLACK_SECONDS


@pytest.mark.parametrize("setup", [PEERS_AT_OWNER, GLOO_AT_OWNER], ids=["peers", "gloo"])
@pytest.mark.parametrize(
    ("lost_rank", "call", "layer_index"),
    [(1, "gather", 0), (1, "scatter", 3)],
    ids=["peer_in_gather", "owner_while_it_attends"],
)
def test_an_exchange_to_which_a_rank_never_comes_ends_at_the_limit(
    setup: TransferSetup, lost_rank: int, call: str, layer_index: int
) -> None:
    losses = run_with_loss(setup, lost_rank, call, layer_index, is_stuck=True, group_limit_seconds=LIMIT_SECONDS)
    for loss in losses:
        assert names_exchange(loss, layer_index), loss.message
        assert "raise kvpp.transfer_timeout_seconds" in loss.message
        assert loss.seconds < LIMIT_SECONDS + SLACK_SECONDS
    assert max(loss.seconds for loss in losses) >= LIMIT_SECONDS


def names_owner_in_place(loss: Loss, layer: int) -> bool:
    """Whether the message names the layer that did not come, with its owner, the group, and what to look at."""
    begin = (
        f"Waiting for the owner of model.layers.{layer}.self_attn.attn, rank {OWNER_BY_LAYER[layer]}, to write it "
        "failed in the KVPP group of ranks [0, 1, 2]: "
    )
    return loss.message.startswith(begin) and "A rank of the group is gone or stuck: see its log" in loss.message


@pytest.mark.parametrize(("lost_rank", "layer_index"), [(0, 0), (1, 3), (2, 6)])
def test_readers_of_an_owner_killed_before_it_tells_notice_at_once(lost_rank: int, layer_index: int) -> None:
    losses = run_with_loss_in_place(
        lost_rank, LAST_STEP, "write", layer_index, is_stuck=False, group_limit_seconds=LONG_LIMIT_SECONDS
    )
    for loss in losses:
        assert names_owner_in_place(loss, layer_index), loss.message
        assert f"group rank {lost_rank} is gone. A rank" in loss.message
        assert loss.seconds < SLACK_SECONDS < LONG_LIMIT_SECONDS


@pytest.mark.parametrize("lost_rank", [1, 2])
def test_an_owner_that_has_more_to_tell_to_a_killed_reader_notices_at_once(lost_rank: int) -> None:
    # The owner of the first three layers is late, so that the reader is gone before the second.
    losses = run_with_loss_in_place(
        lost_rank,
        LAST_STEP,
        "read",
        layer_index=0,
        is_stuck=False,
        group_limit_seconds=LONG_LIMIT_SECONDS,
        setup=PEERS.with_decode(IN_PLACE.with_reads_wrapped(late_owner)),
    )
    owner, reader = losses
    assert re.match(
        r"Telling the other ranks that model\.layers\.[12]\.self_attn\.attn is written failed in the KVPP group "
        rf"of ranks \[0, 1, 2\]: group rank {lost_rank} is gone\. A rank of the group is gone or stuck: see its log",
        owner.message,
    ), owner.message
    # It hears from the owner, whose step has failed, something else or nothing more.
    assert re.match(r"Waiting for the owner of model\.layers\.[12]\..*: group rank 0 ", reader.message), reader
    assert max(owner.seconds, reader.seconds) < SLACK_SECONDS < LONG_LIMIT_SECONDS


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_layer_that_its_owner_never_writes_ends_the_step_of_its_readers_at_the_limit(call: str) -> None:
    # The rank is stuck at its own first layer, or before it.
    layer_index = {"write": 3, "read": 0}[call]
    losses = run_with_loss_in_place(1, LAST_STEP, call, layer_index, is_stuck=True, group_limit_seconds=LIMIT_SECONDS)
    for loss in losses:
        assert names_owner_in_place(loss, layer=3), loss.message
        assert f"nothing from group rank 1 within {LIMIT_SECONDS:g} s" in loss.message
        assert "raise kvpp.transfer_timeout_seconds" in loss.message
        assert LIMIT_SECONDS <= loss.seconds < LIMIT_SECONDS + SLACK_SECONDS


@pytest.mark.parametrize("is_stuck", [False, True], ids=["killed", "stuck"])
def test_a_rank_lost_at_its_last_read_keeps_the_others_from_writing_in_the_next_step(is_stuck: bool) -> None:
    limit_seconds = LIMIT_SECONDS if is_stuck else LONG_LIMIT_SECONDS
    losses = run_with_loss_in_place(
        0, FIRST_STEP, "read", layer_index=6, is_stuck=is_stuck, group_limit_seconds=limit_seconds
    )
    begin = (
        "Waiting until all ranks had read the last decode step's caches failed in the KVPP group of ranks [0, 1, 2]: "
    )
    for loss in losses:
        assert loss.message.startswith(begin), loss.message
        assert (f"nothing from group rank 0 within {LIMIT_SECONDS:g} s" if is_stuck else "is gone") in loss.message
        assert loss.seconds < LIMIT_SECONDS + SLACK_SECONDS
