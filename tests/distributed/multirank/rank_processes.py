"""A set of rank processes that is started once and runs many calls."""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence, Set
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from multirank.rank import Call, Outcome, World, serve


class RanksFailedError(AssertionError):
    """Some rank raised or ended; the message holds the tracebacks of all that did."""

    def __init__(self, failures: Sequence[Outcome]) -> None:
        super().__init__("\n\n".join(str(outcome) for outcome in failures))


class RanksHungError(AssertionError):
    """Some rank did not answer within the limit; the message holds the stacks of all that did not."""


class RankProcesses:
    """`size` processes in one gloo world, started at the first call and again after a failure.

    Ranks are forked from a server that has imported torch and run nothing, because each import takes seconds. A rank
    ends when its owner does, and `close` ends it at once.
    """

    def __init__(self, size: int, *, groups: Sequence[tuple[int, ...]], timeout_seconds: float) -> None:
        self._size = size
        self._groups = tuple(groups)
        self._timeout_seconds = timeout_seconds
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The running processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, calls: Mapping[int, Call], *, limit_seconds: float = 60) -> list[Any]:
        """Run one call on each of some world ranks and return their values, in the order of the ranks.

        Raises:
            RanksFailedError: a rank raised or ended.
            RanksHungError: a rank did not answer within the limit.
        """
        outcomes = self.outcomes(calls, limit_seconds=limit_seconds)
        if failures := [outcome for outcome in outcomes if outcome.is_failure]:
            raise RanksFailedError(failures)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, calls: Mapping[int, Call], *, limit_seconds: float = 60, stuck_ranks: Set[int] = frozenset()
    ) -> list[Outcome]:
        """Run the calls as `run` does, but return failures instead of raising them.

        `stuck_ranks` are not waited for and have no outcome.

        Raises:
            RanksHungError: a rank did not answer within the limit.
        """
        deadline = time.monotonic() + limit_seconds
        if not self._processes:
            self._start()
        for world_rank, call in calls.items():
            self._connections[world_rank].send(call)
        outcomes: dict[int, Outcome] = {}
        try:
            while silent := sorted(calls.keys() - outcomes.keys() - stuck_ranks):
                for world_rank in self._wait_for_any(silent, deadline):
                    outcomes[world_rank] = self._receive(world_rank)
        except BaseException:
            self.close()
            raise
        if stuck_ranks or any(outcome.is_failure for outcome in outcomes.values()):
            # A group that lost a transfer is of no further use.
            self.close()
        return [outcomes[world_rank] for world_rank in sorted(outcomes)]

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._world = World(self._size, Path(self._directory.name), self._groups, self._timeout_seconds)
        context = multiprocessing.get_context("forkserver")
        # A rank imports the main module again, which is pytest.
        context.set_forkserver_preload(["torch.distributed", "pytest"])
        for world_rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(self._world, world_rank, theirs), daemon=True)
            process.start()
            # Only the rank holds its end now, so that its death reads as the end of the connection.
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _wait_for_any(self, silent: Sequence[int], deadline: float) -> list[int]:
        rank_by_connection = {self._connections[world_rank]: world_rank for world_rank in silent}
        ready = wait(list(rank_by_connection), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            raise RanksHungError("\n\n".join(self._describe_stacks(world_rank) for world_rank in silent))
        return [rank_by_connection[connection] for connection in ready if isinstance(connection, Connection)]

    def _receive(self, world_rank: int) -> Outcome:
        try:
            outcome: Outcome = self._connections[world_rank].recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[world_rank]
            process.join()
            return Outcome(world_rank, exit_code=process.exitcode)
        return outcome

    def _describe_stacks(self, world_rank: int) -> str:
        pid = self._processes[world_rank].pid
        stacks = self._world.stack_file(world_rank)
        if pid is None or not stacks.exists():
            return f"rank {world_rank} has not started"
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        return f"rank {world_rank} did not answer in time; it was here:\n{stacks.read_text()}"
