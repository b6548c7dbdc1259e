"""A rank that is gone or stuck in an exchange ends the others' step with an error that says which, in time."""

import signal

import pytest
from multirank.lost_ranks import Loss, be_lost_in_exchange, survive
from multirank.rank import Call
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario
from multirank.schedules import decode
from multirank.setups import AT_OWNER, PEERS, STAGED, TransferSetup
from multirank.toy_model import make_layers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

LIMIT_SECONDS = 3.0
# As in test_lost_rank: two busy cores may start a rank late.
SLACK_SECONDS = 20.0
LONG_LIMIT_SECONDS = 35.0
GROUP_RANKS = (0, 1, 2)
OWNER_BY_LAYER = (0, 0, 0, 1, 1, 2, 2)
PEERS_AT_OWNER, GLOO_AT_OWNER = PEERS.with_decode(AT_OWNER), STAGED.with_decode(AT_OWNER)


def run_with_loss(
    setup: TransferSetup, lost_rank: int, call: str, layer_index: int, *, is_stuck: bool, group_limit_seconds: float
) -> list[Loss]:
    """Lose one of three ranks as a layer's gather or scatter begins; return what the others got."""
    scenario = Scenario(make_layers(len(OWNER_BY_LAYER)), decode()[:3], GROUP_RANKS, setup)
    lost = Call(be_lost_in_exchange, (scenario, call, layer_index, is_stuck))
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
