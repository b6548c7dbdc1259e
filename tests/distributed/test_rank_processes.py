"""The harness itself: no failure of a rank is lost, none lasts, and no process is left."""

import os
import time

import pytest
from multirank.rank import Call, os_call
from multirank.rank_processes import RankProcesses, RanksFailedError, RanksHungError

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_failures_of_all_kinds_are_reported_and_the_ranks_start_again() -> None:
    with RankProcesses(2, groups=[], timeout_seconds=15) as processes:
        with pytest.raises(RanksFailedError, match=r"(?s)rank 1: Traceback.*No such file.*missing"):
            processes.run({0: Call(os_call, (os.getpid,)), 1: Call(os_call, (os.stat, "missing"))})
        assert processes.pids == []

        assert processes.run({1: Call(os_call, (os.getpid,))}) == processes.pids[1:]
        pids = processes.pids
        started = time.monotonic()
        with pytest.raises(RanksHungError, match=r"(?s)rank 0 did not answer.*in os_call"):
            processes.run({0: Call(os_call, (time.sleep, 60))}, limit_seconds=1)
        assert time.monotonic() - started < 10
        assert not any(is_running(pid) for pid in pids)

        with pytest.raises(RanksFailedError, match="rank 0: ended with exit code 3"):
            processes.run({0: Call(os_call, (os._exit, 3))})
        processes.run({0: Call(os_call, (os.getpid,))})
        pids = processes.pids
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)
