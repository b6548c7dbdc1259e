"""Bundles by `torch.distributed.broadcast` on devices without streams (gloo)."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from vllm_kvpp.selection import BlockRuns, LinkTraits, Selection, Way
from vllm_kvpp.transport.base import BundleMemory, PendingTransfer
from vllm_kvpp.transport.block_copies import copy_blocks, stage_blocks
from vllm_kvpp.transport.transfer_thread import TransferThread

# gloo between processes of one machine: about 0.1 ms a call at about 1 GB/s, and copies at several GB/s.
GLOO_TRAITS = LinkTraits(call_bytes=100_000, staging_factor=0.3)


class HostBroadcast:
    """Broadcasts on a thread of its own.

    `staging` is `[num_bytes]` uint8 memory through which scattered blocks travel, `largest_page_bytes` what one block
    of the largest bundle takes in it. Without staging memory, blocks travel whole or in runs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_seconds: float,
        staging: torch.Tensor | None = None,
        largest_page_bytes: int = 0,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._staging = staging
        self.traits = replace(GLOO_TRAITS, blocks_per_chunk=count_staged_blocks(staging, largest_page_bytes))
        self._thread = TransferThread(timeout_seconds)
        self._selection = Selection(Way.WHOLE, BlockRuns())
        self._chunks: tuple[BlockRuns, ...] = ()

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`."""
        self._selection = selection
        self._chunks = selection.blocks.split(self.traits.blocks_per_chunk) if selection.way is Way.STAGED else ()

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        if self._selection.way is Way.STAGED:
            return self._start_staged(memory)
        pieces = select_pieces(memory, self._selection)
        return self._thread.submit(
            partial(self._send, memory.owner_rank, pieces),
            num_bytes=sum(piece.numel() for piece in pieces),
            num_calls=len(pieces),
        )

    def _start_staged(self, memory: BundleMemory) -> PendingTransfer:
        return self._thread.submit(
            partial(self._send_staged, memory, self._chunks),
            num_bytes=self._selection.blocks.num_blocks * memory.page_size_bytes,
            num_calls=len(self._chunks),
        )

    def _send(self, owner_rank: int, pieces: tuple[torch.Tensor, ...]) -> None:
        works = [broadcast(piece, owner_rank, self._group) for piece in pieces]
        for work in works:
            work.wait()

    def _send_staged(self, memory: BundleMemory, chunks: tuple[BlockRuns, ...]) -> None:
        assert self._staging is not None, "there is no staging memory"
        for chunk in chunks:
            staged, num_bytes = stage_blocks(self._staging, memory.components, chunk.num_blocks)
            whole_chunk = BlockRuns(((0, chunk.num_blocks),))
            if memory.owner_rank == self._rank:
                for component, area in zip(memory.components, staged, strict=True):
                    copy_blocks(component, chunk, area, whole_chunk)
            broadcast(self._staging[:num_bytes], memory.owner_rank, self._group).wait()
            if memory.owner_rank != self._rank:
                for component, area in zip(memory.components, staged, strict=True):
                    copy_blocks(area, whole_chunk, component, chunk)


def count_staged_blocks(staging: torch.Tensor | None, largest_page_bytes: int) -> int:
    """Blocks of any bundle that the staging memory takes at once."""
    return staging.numel() // largest_page_bytes if staging is not None and largest_page_bytes > 0 else 0


def select_pieces(memory: BundleMemory, selection: Selection) -> tuple[torch.Tensor, ...]:
    """The contiguous ranges of bytes that a selection moves of a bundle, each a 1-D uint8 view."""
    if selection.way is Way.WHOLE:
        return (memory.whole,)
    return tuple(
        component[first:end].view(-1) for component in memory.components for first, end in selection.blocks.runs
    )


def broadcast(piece: torch.Tensor, owner_rank: int, group: dist.ProcessGroup) -> dist.Work:
    """Start one broadcast inside the group."""
    # group_src, not src: an owner rank counts inside the KVPP group, `src` in the world; they differ once dp or pp > 1.
    work = dist.broadcast(piece, group_src=owner_rank, group=group, async_op=True)
    assert work is not None, "this process is not in the KVPP group"
    return work
