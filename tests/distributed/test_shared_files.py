"""Peer copies leave no file behind, however their processes end: the memory that they share has no name."""

import pytest
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario, calls_for
from multirank.schedules import decode
from multirank.setups import PEERS, STAGED
from multirank.shared_files import run_and_look
from multirank.toy_model import make_layers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

NAMELESS = "/memfd:kvpp (deleted)"


def test_the_memory_that_peers_share_has_no_name_and_is_let_go() -> None:
    with RankProcesses(2, groups=[(0, 1)], timeout_seconds=15) as processes:
        looks = processes.run(calls_for(Scenario(make_layers(4), decode(), (0, 1), PEERS), run_and_look))
    for used, after in looks:
        assert NAMELESS in used
        assert not {path for path in used if path.startswith("/dev/shm")}
        assert NAMELESS not in after


def test_ranks_that_broadcast_share_no_memory() -> None:
    with RankProcesses(2, groups=[(0, 1)], timeout_seconds=15) as processes:
        looks = processes.run(calls_for(Scenario(make_layers(4), decode(), (0, 1), STAGED), run_and_look))
    assert all(NAMELESS not in used for used, _ in looks)
