"""Transports that lose something, which a test must notice."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from multirank.setups import Wrap
from multirank.transports import POISON, WrappedTransfer, Wrapper
from vllm_kvpp.selection import BlockRuns, Selection, Way
from vllm_kvpp.transport.base import BundleMemory, PendingTransfer, TransferSeconds, Transport


def move_nothing(transport: Transport, group_rank: int) -> Transport:
    """No byte arrives."""
    return LosingTransport(transport, is_lost=lambda transfer_index: True)


def lose_layer(target_index: int, num_layers: int) -> Wrap:
    """Of each forward's transfers, one layer's is lost."""
    return partial(_lose_one, target_index, num_layers)


def drop_run(run_index: int) -> Wrap:
    """Of each step's runs of blocks, one is not moved."""
    return partial(_drop_one, run_index)


def spoil_piece(target_index: int, component_index: int, block_index: int, num_layers: int) -> Wrap:
    """Of each step, one block of one component of one layer does not arrive; `block_index` counts active blocks."""
    return partial(_spoil_one, (target_index, component_index, block_index), num_layers)


@dataclass
class LosingTransport(Wrapper):
    """Pretends to have moved the transfers that `is_lost` names by their number since the start."""

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
    num_calls: int = 1

    def wait(self) -> None:
        """Return at once."""

    def seconds(self) -> TransferSeconds:
        """No time."""
        return TransferSeconds(total=0.0, waited=0.0)


@dataclass
class DroppingTransport(Wrapper):
    """Moves all runs of a step's blocks but one."""

    run_index: int

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`."""
        runs = selection.blocks.runs
        kept = tuple(run for index, run in enumerate(runs) if index != self.run_index % len(runs))
        self.inner.prepare(replace(selection, blocks=BlockRuns(kept)))


@dataclass
class SpoilingTransport(Wrapper):
    """Leaves garbage in one block of one component, where `piece` is (target index, component, active block)."""

    group_rank: int
    piece: tuple[int, int, int]
    num_layers: int
    num_started: int = 0
    selection: Selection = field(default_factory=lambda: Selection(Way.WHOLE, BlockRuns()))

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`."""
        self.selection = selection
        self.inner.prepare(selection)

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        target_index = self.num_started % self.num_layers
        self.num_started += 1
        spoiled_index, component_index, block_index = self.piece
        pending = self.inner.start(memory)
        if target_index != spoiled_index or memory.owner_rank == self.group_rank:
            return pending
        return SpoiledTransfer(pending, memory, component_index, list(self.selection.blocks)[block_index])


@dataclass(eq=False)
class SpoiledTransfer(WrappedTransfer):
    """A transfer of which one block of one component is lost."""

    memory: BundleMemory
    component_index: int
    block_id: int

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        self.inner.wait()
        self.memory.components[self.component_index][self.block_id] = POISON


def _lose_one(target_index: int, num_layers: int, transport: Transport, group_rank: int) -> Transport:
    return LosingTransport(transport, is_lost=lambda transfer_index: transfer_index % num_layers == target_index)


def _drop_one(run_index: int, transport: Transport, group_rank: int) -> Transport:
    return DroppingTransport(transport, run_index)


def _spoil_one(piece: tuple[int, int, int], num_layers: int, transport: Transport, group_rank: int) -> Transport:
    return SpoilingTransport(transport, group_rank, piece, num_layers)
