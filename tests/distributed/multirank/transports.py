"""What is put round a product's transport: strictness, delays, and a preference for staging."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from vllm_kvpp.selection import BlockRuns, LinkTraits, Selection, Way
from vllm_kvpp.transport.base import BundleMemory, PendingTransfer, TransferSeconds, Transport

POISON = 0xA5
_RESTLESS_SECONDS = 0.001
_LATE_SECONDS = 0.008


@dataclass
class Wrapper:
    """A transport that hands everything on to another one."""

    inner: Transport

    @property
    def traits(self) -> LinkTraits:
        """See `Transport.traits`."""
        return self.inner.traits

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`."""
        self.inner.prepare(selection)

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        return self.inner.start(memory)


@dataclass(eq=False)
class WrappedTransfer:
    """A transfer that hands everything on to another one."""

    inner: PendingTransfer

    @property
    def num_bytes(self) -> int:
        """See `PendingTransfer`."""
        return self.inner.num_bytes

    @property
    def num_calls(self) -> int:
        """See `PendingTransfer`."""
        return self.inner.num_calls

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        self.inner.wait()

    def seconds(self) -> TransferSeconds | None:
        """See `PendingTransfer.seconds`."""
        return self.inner.seconds()


def unwrap(transport: Transport) -> Iterator[Transport]:
    """The transport and everything inside it, outermost first."""
    while isinstance(transport, Wrapper):
        yield transport
        transport = transport.inner
    yield transport


class StagingTransport(Wrapper):
    """Scattering is worth more than it costs: whoever may stage does."""

    @property
    def traits(self) -> LinkTraits:
        """See `Transport.traits`."""
        return replace(self.inner.traits, call_bytes=0, staging_factor=-0.5)


@dataclass
class StrictTransport(Wrapper):
    """Bytes arrive only in `wait`, and only the selected blocks'; until then, and elsewhere, receivers hold garbage.

    Broadcasts read the source at once. So an early read, a late wait, a reused buffer, a forgotten transfer and a block
    that was needed but not selected all show, whatever the timing. `violations` lists writes to memory under transfer,
    and blocks that came unasked.
    """

    group_rank: int
    violations: list[str] = field(default_factory=list)
    under_way: list["StrictTransfer"] = field(default_factory=list)
    selection: Selection = field(default_factory=lambda: Selection(Way.WHOLE, BlockRuns()))

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`."""
        self.selection = selection
        self.inner.prepare(selection)

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        if memory.owner_rank != self.group_rank:
            memory.whole.fill_(POISON)
        arriving = _copy(memory)
        untouched = memory.whole.clone()
        transfer = StrictTransfer(self.inner.start(arriving), self, memory, arriving, untouched, self.selection)
        self.under_way.append(transfer)
        return transfer


@dataclass(eq=False)
class StrictTransfer(WrappedTransfer):
    """A transfer that lands in `wait`."""

    transport: StrictTransport
    memory: BundleMemory
    arriving: BundleMemory
    untouched: torch.Tensor
    selection: Selection

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        if self not in self.transport.under_way:
            return
        self.transport.under_way.remove(self)
        self.inner.wait()
        if not torch.equal(self.memory.whole, self.untouched):
            self.transport.violations.append("memory was written while its transfer was under way")
        if self.memory.owner_rank != self.transport.group_rank:
            for target, arrived in zip(self.memory.components, self.arriving.components, strict=True):
                self._land(target, arrived)

    def _land(self, target: torch.Tensor, arrived: torch.Tensor) -> None:
        is_selected = torch.full((len(target),), self.selection.way is Way.WHOLE)
        for first, end in self.selection.blocks.runs:
            is_selected[first:end] = True
        if not (arrived[~is_selected] == POISON).all():
            self.transport.violations.append("blocks have arrived that were not selected")
        target[is_selected] = arrived[is_selected]


@dataclass
class UnevenTransport(Wrapper):
    """Starts each step and each transfer a little late, on each rank by another time."""

    generator: random.Random

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`."""
        self._pause()
        self.inner.prepare(selection)

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        self._pause()
        return self.inner.start(memory)

    def _pause(self) -> None:
        time.sleep(self.generator.choice((0, 0, 0.005)))


@dataclass
class RestlessTransport(Wrapper):
    """An owner that writes its bundles as soon and as long as it may: for a moment each byte is another one.

    A receiver that reads an owner's memory before the owner has prepared, or after its wait, reads garbage. Before a
    step every other rank takes longer, in turns, so that the rest would be ahead of it.
    """

    group_rank: int
    owned: dict[int, torch.Tensor] = field(default_factory=dict)
    num_prepared: int = 0

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`."""
        self.num_prepared += 1
        is_late = (self.group_rank + self.num_prepared) % 2 == 0
        scramble(*self.owned.values(), seconds=_LATE_SECONDS if is_late else _RESTLESS_SECONDS)
        self.inner.prepare(selection)

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        pending = self.inner.start(memory)
        if memory.owner_rank != self.group_rank:
            return pending
        self.owned[memory.whole.data_ptr()] = memory.whole
        return RestlessTransfer(pending, memory.whole)


@dataclass(eq=False)
class RestlessTransfer(WrappedTransfer):
    """A transfer at its owner, who writes the bundle once it may."""

    whole: torch.Tensor

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        self.inner.wait()
        scramble(self.whole)


def scramble(*bundles: torch.Tensor, seconds: float = _RESTLESS_SECONDS) -> None:
    """Turn every bit over, and back after a moment."""
    for bundle in bundles:
        bundle.bitwise_not_()
    time.sleep(seconds if bundles else 0)
    for bundle in bundles:
        bundle.bitwise_not_()


def _copy(memory: BundleMemory) -> BundleMemory:
    whole = memory.whole.clone()
    parts = whole.split([component.numel() for component in memory.components])
    components = tuple(part.view_as(like) for part, like in zip(parts, memory.components, strict=True))
    return replace(memory, whole=whole, components=components)
