"""Short messages between the ranks of one host: what happened before one is sent is seen by who has received it.

Each rank reads from one pipe per peer. A pipe takes a fraction of the time of a collective, and it closes when its
writer dies, so that a reader learns of it at once.
"""

import hashlib
import os
import select
import struct
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

# All messages are equally long, and short enough for the system to write each as a whole.
MESSAGE_BYTES = 12


def make_message(subject: str, number: int) -> bytes:
    """Name what a step does and the place in it, so that no message can be taken for another."""
    return digest(subject) + struct.pack("<I", number)


@lru_cache(maxsize=8)
def digest(subject: str) -> bytes:
    """The first bytes of a message about `subject`."""
    return hashlib.sha256(subject.encode()).digest()[:8]


class UnexpectedMessageError(RuntimeError):
    """A peer is somewhere else in its work than this rank; `peer` has sent `received`."""

    def __init__(self, peer: int, received: bytes, expected: bytes) -> None:
        super().__init__(
            f"group rank {peer} does not move the same in this step ({received.hex()}, not {expected.hex()})"
        )
        self.peer = peer
        self.received = received


@dataclass(frozen=True)
class PipeHandle:
    """Where a peer finds the end of a pipe that it writes to."""

    pid: int
    fd: int


class Inbox:
    """The reading ends of one rank's pipes, by the rank that writes; `handles` are for the writers."""

    def __init__(self, peers: tuple[int, ...]) -> None:
        pipes = {peer: os.pipe() for peer in peers}
        self.readers = {peer: reader for peer, (reader, _) in pipes.items()}
        self._writing = {peer: writer for peer, (_, writer) in pipes.items()}

    @property
    def handles(self) -> dict[int, PipeHandle]:
        """Valid until `close_writing`."""
        return {peer: PipeHandle(os.getpid(), fd) for peer, fd in self._writing.items()}

    def close_writing(self) -> None:
        """Call when every peer has opened its end: a pipe that this rank could write to would never close."""
        while self._writing:
            os.close(self._writing.popitem()[1])


def open_writer(handle: PipeHandle) -> int:
    """Open a peer's pipe for writing.

    Raises:
        OSError: the peer is gone, in another process namespace, or may not be reached by this user.
    """
    return os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_WRONLY)


class Signals:
    """Messages to and from the other ranks; those of one sender arrive in order. Closes its pipes at its end.

    For `eager_seconds` a wait looks again and again before it sleeps: waking up takes longer than most of them. Not for
    a thread that shares its core with one that computes.
    """

    def __init__(
        self, inbox: Inbox, writers: Mapping[int, int], timeout_seconds: float, eager_seconds: float = 0.0
    ) -> None:
        self._eager_seconds = eager_seconds
        self._writers = dict(writers)
        self._timeout_seconds = timeout_seconds
        self._peer_by_reader = {reader: peer for peer, reader in inbox.readers.items()}
        self._arrived: dict[int, deque[bytes]] = {peer: deque() for peer in inbox.readers}
        self._gone: set[int] = set()
        self._poller = select.poll()
        for reader in self._peer_by_reader:
            self._poller.register(reader, select.POLLIN)
        self.close = weakref.finalize(self, _close_all, (*self._peer_by_reader, *self._writers.values()))

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks of the group."""
        return tuple(self._writers)

    def send(self, peer: int, message: bytes) -> None:
        """Send without waiting for the receiver.

        Raises:
            RuntimeError: the peer is gone.
        """
        assert len(message) == MESSAGE_BYTES, f"a message of {len(message)} bytes"
        try:
            os.write(self._writers[peer], message)
        except OSError as error:
            raise RuntimeError(f"group rank {peer} is gone") from error

    def expect(self, message: bytes, peers: Collection[int] | None = None) -> None:
        """Wait until `peers`, or every other rank, have sent a message, and hold it against what it should be.

        Raises:
            TimeoutError: not within the limit, with the ranks that are missing.
            RuntimeError: a peer is gone, or has sent something else.
        """
        started = time.monotonic()
        deadline, eager_until = started + self._timeout_seconds, started + self._eager_seconds
        peers = self.peers if peers is None else peers
        while missing := [peer for peer in peers if not self._arrived[peer]]:
            # Of all at once: a peer that is gone shows behind one that is only stuck because of it.
            for peer in self._gone.intersection(missing):
                raise RuntimeError(f"group rank {peer} is gone")
            is_eager = (now := time.monotonic()) < eager_until
            ready = self._poller.poll(0 if is_eager else max(0.0, deadline - now) * 1000)
            if not ready and is_eager:
                # Another process that wants this core gets it, rather than that of the rank that is waited for.
                os.sched_yield()
                continue
            if not ready:
                ranks = ", ".join(map(str, missing))
                raise TimeoutError(f"nothing from group rank {ranks} within {self._timeout_seconds:g} s")
            for reader, _ in ready:
                self._receive(reader)
        for peer in peers:
            if (received := self._arrived[peer].popleft()) != message:
                raise UnexpectedMessageError(peer, received, message)

    def _receive(self, reader: int) -> None:
        peer = self._peer_by_reader[reader]
        if received := os.read(reader, MESSAGE_BYTES):
            self._arrived[peer].append(received)
        else:
            # What it sent before has arrived. A closed pipe would be ready for ever.
            self._gone.add(peer)
            self._poller.unregister(reader)


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
