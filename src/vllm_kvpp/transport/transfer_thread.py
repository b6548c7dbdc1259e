"""Transfers on devices without streams: one behind the other on a thread, while the caller computes."""

import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch

from vllm_kvpp.selection import TransferSeconds

TRANSFER_RANGE = "kvpp.transfer"


class HostTransfer:
    """A transfer that the thread runs; waiting blocks the host, for at most the limit.

    A bare lock says when it is done: a future's condition variable takes as long as copying a few blocks.
    """

    def __init__(self, move: Callable[[], None], num_bytes: int, num_calls: int, timeout_seconds: float) -> None:
        self.num_bytes = num_bytes
        self.num_calls = num_calls
        self._move: Callable[[], None] | None = move
        self._timeout_seconds = timeout_seconds
        self._is_running = threading.Lock()
        self._is_running.acquire()
        self._failure: Exception | None = None
        self._total_seconds: float | None = None
        self._waited_seconds: float | None = None

    def run(self) -> None:
        """Move; called once, on the thread."""
        assert self._move is not None, "a transfer ran twice"
        started = time.monotonic()
        try:
            with torch.profiler.record_function(TRANSFER_RANGE):
                self._move()
        except Exception as error:
            # gloo reports a lost peer and a time-out by the same type.
            is_late = time.monotonic() - started >= self._timeout_seconds
            self._failure = TimeoutError(str(error)) if is_late else error
        self._total_seconds = time.monotonic() - started
        # Not kept until the next move: its memory may be gone by then.
        self._move = None
        self._is_running.release()

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        started = time.monotonic()
        has_ended = self._is_running.acquire(timeout=self._timeout_seconds)
        self._waited_seconds = time.monotonic() - started
        if not has_ended or isinstance(self._failure, TimeoutError):
            raise TimeoutError(f"not finished after {self._timeout_seconds:g} s") from self._failure
        # It may be waited for again.
        self._is_running.release()
        if self._failure is not None:
            raise self._failure

    def seconds(self) -> TransferSeconds | None:
        """See `PendingTransfer.seconds`."""
        if self._waited_seconds is None or self._total_seconds is None or self._failure is not None:
            return None
        return TransferSeconds(total=self._total_seconds, waited=self._waited_seconds)


_Transfers = queue.SimpleQueue[HostTransfer | None]


class TransferThread:
    """Runs moves in the order in which they are submitted.

    A daemon, which ends with this object: a move that hangs on a lost peer does not keep the process from ending.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._transfers: _Transfers = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._transfers,), name="kvpp-transfers", daemon=True).start()
        weakref.finalize(self, self._transfers.put, None)

    def submit(self, move: Callable[[], None], *, num_bytes: int, num_calls: int) -> HostTransfer:
        """Queue a move. Does not block."""
        transfer = HostTransfer(move, num_bytes, num_calls, self._timeout_seconds)
        self._transfers.put(transfer)
        return transfer


def _run(transfers: _Transfers) -> None:
    while (transfer := transfers.get()) is not None:
        transfer.run()
        del transfer
