"""Transfers on devices without streams: one behind the other on a thread, while the caller computes."""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

from vllm_kvpp.selection import TransferSeconds

TRANSFER_RANGE = "kvpp.transfer"


class HostTransfer:
    """A transfer that the thread runs; waiting blocks the host, for at most the limit."""

    def __init__(self, future: "Future[float]", num_bytes: int, num_calls: int, timeout_seconds: float) -> None:
        self._future = future
        self.num_bytes = num_bytes
        self.num_calls = num_calls
        self._timeout_seconds = timeout_seconds
        self._waited_seconds: float | None = None

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        started = time.monotonic()
        try:
            self._future.result(self._timeout_seconds)
        except TimeoutError as error:
            raise TimeoutError(f"not finished after {self._timeout_seconds:g} s") from error
        finally:
            self._waited_seconds = time.monotonic() - started

    def seconds(self) -> TransferSeconds | None:
        """See `PendingTransfer.seconds`."""
        if self._waited_seconds is None or not self._future.done() or self._future.exception() is not None:
            return None
        return TransferSeconds(total=self._future.result(), waited=self._waited_seconds)


_Moves = queue.SimpleQueue["tuple[Future[float], Callable[[], None]] | None"]


class TransferThread:
    """Runs moves in the order in which they are submitted.

    A daemon, which ends with this object: a move that hangs on a lost peer does not keep the process from ending.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._moves: _Moves = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._moves, timeout_seconds), name="kvpp-transfers", daemon=True).start()
        weakref.finalize(self, self._moves.put, None)

    def submit(self, move: Callable[[], None], *, num_bytes: int, num_calls: int) -> HostTransfer:
        """Queue a move. Does not block."""
        future: Future[float] = Future()
        self._moves.put((future, move))
        return HostTransfer(future, num_bytes, num_calls, self._timeout_seconds)


def _run(moves: _Moves, timeout_seconds: float) -> None:
    while (submitted := moves.get()) is not None:
        future, move = submitted
        started = time.monotonic()
        try:
            with torch.profiler.record_function(TRANSFER_RANGE):
                move()
        except Exception as error:
            # gloo reports a lost peer and a time-out by the same type.
            is_late = time.monotonic() - started >= timeout_seconds
            future.set_exception(TimeoutError(str(error)) if is_late else error)
        else:
            future.set_result(time.monotonic() - started)
        # Not kept until the next move: their memory may be gone by then.
        del submitted, future, move
