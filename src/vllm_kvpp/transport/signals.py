"""Short messages between the ranks of one host: what happened before one is sent is seen by who has received it.

Each rank reads from one pipe per peer. A pipe takes a fraction of the time of a collective, and it closes when its
writer dies, so that a reader learns of it at once.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class PipeHandle:
    """Where a peer finds the end of a pipe that it writes to."""

    pid: int
    fd: int


class Inbox:
    """The reading ends of one rank's pipes, by the rank that writes; `handles` are for the writers."""

    def __init__(self, peers: tuple[int, ...]) -> None:
        pipes = {peer: os.pipe() for peer in peers}
        self.readers = {peer: Connection(fd, writable=False) for peer, (fd, _) in pipes.items()}
        self._writing = {peer: fd for peer, (_, fd) in pipes.items()}

    @property
    def handles(self) -> dict[int, PipeHandle]:
        """Valid until `close_writing`."""
        return {peer: PipeHandle(os.getpid(), fd) for peer, fd in self._writing.items()}

    def close_writing(self) -> None:
        """Call when every peer has opened its end: a pipe that this rank could write to would never close."""
        while self._writing:
            os.close(self._writing.popitem()[1])


def open_writer(handle: PipeHandle) -> Connection:
    """Open a peer's pipe for writing.

    Raises:
        OSError: the peer is gone, in another process namespace, or may not be reached by this user.
    """
    return Connection(os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_WRONLY), readable=False)


class Signals:
    """Messages to and from the other ranks; those of one sender arrive in order."""

    def __init__(self, inbox: Inbox, writers: Mapping[int, Connection], timeout_seconds: float) -> None:
        self._readers = inbox.readers
        self._writers = dict(writers)
        self._timeout_seconds = timeout_seconds

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks of the group."""
        return tuple(self._writers)

    def send(self, peer: int, message: bytes) -> None:
        """Send without waiting for the receiver.

        Raises:
            RuntimeError: the peer is gone.
        """
        try:
            self._writers[peer].send_bytes(message)
        except OSError as error:
            raise RuntimeError(f"group rank {peer} is gone") from error

    def expect(self, message: bytes) -> None:
        """Wait until every other rank has sent a message, and hold it against what it should be.

        Raises:
            TimeoutError: not within the limit, with the ranks that are missing.
            RuntimeError: a peer is gone, or has sent something else.
        """
        deadline = time.monotonic() + self._timeout_seconds
        for peer in self._readers:
            if (received := self._receive(peer, deadline)) != message:
                raise RuntimeError(
                    f"group rank {peer} does not move the same blocks in this step ({received.hex()}, not "
                    f"{message.hex()})"
                )

    def _receive(self, peer: int, deadline: float) -> bytes:
        reader = self._readers[peer]
        try:
            if not reader.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"nothing from group rank {peer} within {self._timeout_seconds:g} s")
            return reader.recv_bytes()
        except EOFError as error:
            raise RuntimeError(f"group rank {peer} is gone") from error
