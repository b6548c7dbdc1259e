"""The transports that scenarios run on: the product's, a strict one, and broken ones that a test must notice."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from vllm_kvpp.transport.base import BundleMemory, PendingTransfer, Transport
from vllm_kvpp.transport.broadcast import make_broadcast

POISON = 0xA5

MakeTransport = Callable[[dist.ProcessGroup, int, float], Transport]


def broadcast(group: dist.ProcessGroup, group_rank: int, timeout_seconds: float) -> Transport:
    """The product's transport."""
    return make_broadcast(group, torch.device("cpu"), timeout_seconds)


def strict(group: dist.ProcessGroup, group_rank: int, timeout_seconds: float) -> Transport:
    """The product's transport, with every freedom that the contract gives it used to the utmost."""
    return StrictTransport(broadcast(group, group_rank, timeout_seconds), group_rank)


def uneven(group: dist.ProcessGroup, group_rank: int, timeout_seconds: float) -> Transport:
    """The product's transport on ranks that take turns in being ahead."""
    return UnevenTransport(broadcast(group, group_rank, timeout_seconds), random.Random(group_rank))


def moves_nothing(group: dist.ProcessGroup, group_rank: int, timeout_seconds: float) -> Transport:
    """Broken: no byte arrives."""
    return LosingTransport(broadcast(group, group_rank, timeout_seconds), is_lost=lambda transfer_index: True)


def loses_layer(target_index: int, num_layers: int) -> MakeTransport:
    """Broken: of each forward's transfers, one layer's is lost."""
    return partial(_lose_one, target_index, num_layers)


@dataclass
class StrictTransport:
    """The source is read at once, and bytes arrive only in `wait`; between, receivers hold garbage.

    So an early read, a late wait, a reused buffer and a forgotten transfer all show, whatever the timing.
    `violations` lists writes to memory under transfer.
    """

    inner: Transport
    group_rank: int
    violations: list[str] = field(default_factory=list)
    under_way: list["StrictTransfer"] = field(default_factory=list)

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        arriving = _copy(memory)
        pending = self.inner.start(arriving)
        if memory.owner_rank != self.group_rank:
            memory.whole.fill_(POISON)
        transfer = StrictTransfer(self, pending, memory, arriving, memory.whole.clone())
        self.under_way.append(transfer)
        return transfer


@dataclass(eq=False)
class StrictTransfer:
    """A transfer that lands in `wait`."""

    transport: StrictTransport
    pending: PendingTransfer
    memory: BundleMemory
    arriving: BundleMemory
    untouched: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """See `PendingTransfer`."""
        return self.pending.num_bytes

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        if self not in self.transport.under_way:
            return
        self.transport.under_way.remove(self)
        self.pending.wait()
        if not torch.equal(self.memory.whole, self.untouched):
            self.transport.violations.append("memory was written while its transfer was under way")
        if self.memory.owner_rank != self.transport.group_rank:
            self.memory.whole.copy_(self.arriving.whole)


@dataclass
class UnevenTransport:
    """Starts each transfer a little late, on each rank by another time."""

    inner: Transport
    generator: random.Random

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        time.sleep(self.generator.choice((0, 0, 0.005)))
        return self.inner.start(memory)


@dataclass
class LosingTransport:
    """Pretends to have moved the transfers that `is_lost` names by their number since the start."""

    inner: Transport
    is_lost: Callable[[int], bool]
    num_started: int = 0

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        transfer_index = self.num_started
        self.num_started += 1
        if self.is_lost(transfer_index):
            return LostTransfer(memory.whole.numel())
        return self.inner.start(memory)


@dataclass
class LostTransfer:
    """Nothing is under way."""

    num_bytes: int

    def wait(self) -> None:
        """Return at once."""


def _lose_one(
    target_index: int, num_layers: int, group: dist.ProcessGroup, group_rank: int, timeout_seconds: float
) -> Transport:
    inner = broadcast(group, group_rank, timeout_seconds)
    return LosingTransport(inner, is_lost=lambda transfer_index: transfer_index % num_layers == target_index)


def _copy(memory: BundleMemory) -> BundleMemory:
    whole = memory.whole.clone()
    parts = whole.split([component.numel() for component in memory.components])
    components = tuple(part.view_as(like) for part, like in zip(parts, memory.components, strict=True))
    return replace(memory, whole=whole, components=components)
