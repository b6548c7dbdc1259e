"""What is put round a product's reads in place: delays, losses, and who does not wait, which a test must notice."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_kvpp.transport.owner_reads import OwnerReads

ReadsWrap = Callable[[OwnerReads, int], OwnerReads]
"""Puts something round the reads of one group rank."""

# A prompt is computed in it several times over.
_LATE_SECONDS = 0.05


@dataclass
class ReadsWrapper(OwnerReads):
    """Reads that hand everything on to other ones."""

    inner: OwnerReads

    def prepare(self, num_rows: int) -> None:
        """See `OwnerReads.prepare`."""
        self.inner.prepare(num_rows)

    def tell_written(self, number: int) -> None:
        """See `OwnerReads.tell_written`."""
        self.inner.tell_written(number)

    def await_written(self, owner_rank: int, number: int) -> None:
        """See `OwnerReads.await_written`."""
        self.inner.await_written(owner_rank, number)

    def tell_read(self) -> None:
        """See `OwnerReads.tell_read`."""
        self.inner.tell_read()

    def begin_step(self) -> None:
        """See `OwnerReads.begin_step`."""
        self.inner.begin_step()


class LateOwner(ReadsWrapper):
    """Begins each step, and goes on behind each of its layers, when the others would long be reading."""

    def prepare(self, num_rows: int) -> None:
        """See `OwnerReads.prepare`."""
        self.inner.prepare(num_rows)
        time.sleep(_LATE_SECONDS)

    def tell_written(self, number: int) -> None:
        """See `OwnerReads.tell_written`."""
        self.inner.tell_written(number)
        time.sleep(_LATE_SECONDS)


class LateReader(ReadsWrapper):
    """Reads each cache when its owner would long be in the next step."""

    def await_written(self, owner_rank: int, number: int) -> None:
        """See `OwnerReads.await_written`."""
        self.inner.await_written(owner_rank, number)
        time.sleep(_LATE_SECONDS)


@dataclass
class HastyReader(ReadsWrapper):
    """Broken: reads at once, and hears at the end of the step that it might."""

    owed: list[tuple[int, int]] = field(default_factory=list)

    def await_written(self, owner_rank: int, number: int) -> None:
        """Return at once."""
        self.owed.append((owner_rank, number))

    def tell_read(self) -> None:
        """See `OwnerReads.tell_read`."""
        while self.owed:
            self.inner.await_written(*self.owed.pop(0))
        self.inner.tell_read()


class HastyOwner(ReadsWrapper):
    """Broken: waits for readers only before a step that reads in place itself."""

    def prepare(self, num_rows: int) -> None:
        """See `OwnerReads.prepare`."""
        self.inner.begin_step()
        self.inner.prepare(num_rows)

    def begin_step(self) -> None:
        """Return at once."""


@dataclass
class LostReads(ReadsWrapper):
    """Does something else in one step, counted from 0, before it tells that a place is written, or as it would read."""

    step: int
    call: str
    number: int
    instead: Callable[[], None]
    num_prepared: int = 0

    def prepare(self, num_rows: int) -> None:
        """See `OwnerReads.prepare`."""
        self.num_prepared += 1
        self.inner.prepare(num_rows)

    def tell_written(self, number: int) -> None:
        """See `OwnerReads.tell_written`."""
        self._pass("write", number)
        self.inner.tell_written(number)

    def await_written(self, owner_rank: int, number: int) -> None:
        """See `OwnerReads.await_written`."""
        self.inner.await_written(owner_rank, number)
        self._pass("read", number)

    def _pass(self, call: str, number: int) -> None:
        if (self.num_prepared - 1, call, number) == (self.step, self.call, self.number):
            self.instead()


def late_owner(reads: OwnerReads, group_rank: int) -> OwnerReads:
    """The owner of the first layers is late."""
    return LateOwner(reads) if group_rank == 0 else reads


def late_reader(reads: OwnerReads, group_rank: int) -> OwnerReads:
    """Who reads the last layers, and does not own them, is late."""
    return LateReader(reads) if group_rank == 0 else reads


def hasty_reader(reads: OwnerReads, group_rank: int) -> OwnerReads:
    """Nobody waits until the owner has written."""
    return HastyReader(reads)


def hasty_owner(reads: OwnerReads, group_rank: int) -> OwnerReads:
    """Nobody waits until the readers have read."""
    return HastyOwner(reads)
