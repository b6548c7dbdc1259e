"""Bundles by `torch.distributed.broadcast` on devices with streams, on a stream of its own."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from vllm_kvpp.selection import BlockRuns, LinkTraits, Selection, TransferSeconds, Way
from vllm_kvpp.transport.base import BundleMemory, PendingTransfer
from vllm_kvpp.transport.block_copies import stage_blocks
from vllm_kvpp.transport.broadcast import broadcast, count_staged_blocks, select_pieces
from vllm_kvpp.transport.transfer_thread import TRANSFER_RANGE

# From data sheets, not measured: some 10 µs a call at 200 GB/s, and copies at the speed of the device's memory.
DEVICE_TRAITS = LinkTraits(call_bytes=2_000_000, staging_factor=0.3)
# Rows are copied element by element; the widest type that fits makes the fewest.
WIDE_TYPES = (torch.int64, torch.int32, torch.int16)


class DeviceStreams(Protocol):
    """The stream calls that ordering needs, so that a test can record them."""

    def current(self) -> torch.Stream:
        """The stream on which the caller's work is queued."""

    def use(self, stream: torch.Stream) -> torch.Stream:
        """A context manager that makes `stream` the current one."""

    def event(self) -> torch.Event:
        """A new event that notes its time."""

    def index(self, block_ids: list[int]) -> torch.Tensor:
        """Copy ids to the device as int64, on the current stream, without waiting for it."""


class AcceleratorStreams:
    """`DeviceStreams` through torch's device-agnostic calls: CUDA, ROCm, XPU, and out-of-tree devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> torch.Stream:
        """The current stream of the device."""
        return torch.accelerator.current_stream(self._device)

    def use(self, stream: torch.Stream) -> torch.Stream:
        """A `torch.Stream` is its own context manager."""
        return stream

    def event(self) -> torch.Event:
        """An event with timing."""
        return torch.Event(self._device, enable_timing=True)

    def index(self, block_ids: list[int]) -> torch.Tensor:
        """Through pinned memory: from any other, the copy would block the host."""
        return torch.tensor(block_ids, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)


class StreamTransfer:
    """A transfer queued on the transfer stream; waiting orders the current stream and never blocks the host."""

    def __init__(self, begun: torch.Event, done: torch.Event, size: tuple[int, int], streams: DeviceStreams) -> None:
        self._begun = begun
        self._done = done
        self.num_bytes, self.num_calls = size
        self._streams = streams
        self._reached: torch.Event | None = None

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        self._reached = self._streams.event()
        self._reached.record(self._streams.current())
        self._streams.current().wait_event(self._done)

    def seconds(self) -> TransferSeconds | None:
        """See `PendingTransfer.seconds`."""
        if self._reached is None or not (self._reached.query() and self._done.query()):
            return None
        waited = self._reached.elapsed_time(self._done) / 1000
        return TransferSeconds(total=self._begun.elapsed_time(self._done) / 1000, waited=max(0.0, waited))


@dataclass(frozen=True)
class StagedChunk:
    """As many blocks as the staging memory takes: their number, and their ids on the device."""

    num_blocks: int
    index: torch.Tensor


class StreamBroadcast:
    """Broadcasts ordered by events (R-RUN-4); `staging` and `largest_page_bytes` as of `HostBroadcast`.

    A collective that never finishes is ended by the process group's own limit, which the caller sets when it makes
    the group: the host does not wait here, so nothing here could notice.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        streams: DeviceStreams,
        transfer_stream: torch.Stream,
        staging: torch.Tensor | None = None,
        largest_page_bytes: int = 0,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._streams = streams
        self._transfer_stream = transfer_stream
        self._staging = staging
        self.traits = replace(DEVICE_TRAITS, blocks_per_chunk=count_staged_blocks(staging, largest_page_bytes))
        self._selection = Selection(Way.WHOLE, BlockRuns())
        self._chunks: tuple[StagedChunk, ...] = ()

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`."""
        if selection == self._selection:
            return
        self._selection = selection
        self._chunks = ()
        if selection.way is Way.STAGED:
            # On the transfer stream, which alone reads the indices: their memory is not reused under it.
            with self._streams.use(self._transfer_stream):
                self._chunks = tuple(
                    StagedChunk(chunk.num_blocks, self._streams.index(list(chunk)))
                    for chunk in selection.blocks.split(self.traits.blocks_per_chunk)
                )

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        # Recorded on the compute stream: behind it lie the last write of the source and the last read of the scratch
        # buffer, so the transfer cannot overtake either.
        ready = self._streams.event()
        ready.record(self._streams.current())
        with self._streams.use(self._transfer_stream), torch.profiler.record_function(TRANSFER_RANGE):
            self._transfer_stream.wait_event(ready)
            begun = self._streams.event()
            begun.record(self._transfer_stream)
            size = self._queue(memory)
            done = self._streams.event()
            # Recorded after the last call on every rank, so the owner too waits until its bytes have been read.
            done.record(self._transfer_stream)
        return StreamTransfer(begun, done, size, self._streams)

    def _queue(self, memory: BundleMemory) -> tuple[int, int]:
        if self._selection.way is Way.STAGED:
            for chunk in self._chunks:
                self._queue_chunk(memory, chunk)
            return self._selection.blocks.num_blocks * memory.page_size_bytes, len(self._chunks)
        pieces = select_pieces(memory, self._selection)
        works = [broadcast(piece, memory.owner_rank, self._group) for piece in pieces]
        for work in works:
            # Orders the transfer stream after the collective, which runs on a stream of the backend's own.
            work.wait()
        return sum(piece.numel() for piece in pieces), len(pieces)

    def _queue_chunk(self, memory: BundleMemory, chunk: StagedChunk) -> None:
        assert self._staging is not None, "there is no staging memory"
        areas, num_bytes = stage_blocks(self._staging, memory.components, chunk.num_blocks)
        pairs = [_widen(component, area) for component, area in zip(memory.components, areas, strict=True)]
        if memory.owner_rank == self._rank:
            for component, area in pairs:
                torch.index_select(component, 0, chunk.index, out=area)
        broadcast(self._staging[:num_bytes], memory.owner_rank, self._group).wait()
        if memory.owner_rank != self._rank:
            for component, area in pairs:
                component.index_copy_(0, chunk.index, area)


def _widen(component: torch.Tensor, area: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View both by the widest type at whose boundaries their rows begin."""
    for dtype in WIDE_TYPES:
        places = (component.shape[1], component.data_ptr(), area.data_ptr())
        if all(place % dtype.itemsize == 0 for place in places):
            return component.view(dtype), area.view(dtype)
    return component, area


def make_stream_broadcast(
    group: dist.ProcessGroup, device: torch.device, staging: torch.Tensor | None = None, largest_page_bytes: int = 0
) -> StreamBroadcast:
    """Broadcasts on a new stream of `device`."""
    return StreamBroadcast(group, AcceleratorStreams(device), torch.Stream(device), staging, largest_page_bytes)
