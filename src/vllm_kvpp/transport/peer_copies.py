"""Receivers copy the blocks from the owner's memory themselves; signals only say when.

```text
owner     prepare ──── meet ─┐                            write layer n
receiver  prepare ──── meet ─┴─ copy layer n ── tell the owner ─┘
```

Each rank comes to `prepare` when what it wrote in earlier steps is written, so after the meeting all bundles may be
read. An owner writes a bundle again when every receiver has told it that it has its copy.
"""

import hashlib
import struct
from functools import partial

from vllm_kvpp.selection import BlockRuns, LinkTraits, Selection, Way
from vllm_kvpp.transport.base import BundleMemory, PendingTransfer
from vllm_kvpp.transport.block_copies import copy_blocks
from vllm_kvpp.transport.signals import Signals
from vllm_kvpp.transport.transfer_thread import TransferThread


class PeerCopies:
    """Transfers between ranks that can read each other's memory; every bundle needs its `source` at the receivers."""

    # A copy call takes about a microsecond, in which several kilobytes are copied.
    traits = LinkTraits(call_bytes=4_096)

    def __init__(self, rank: int, signals: Signals, timeout_seconds: float) -> None:
        self._rank = rank
        self._signals = signals
        self._thread = TransferThread(timeout_seconds)
        self._selection = Selection(Way.WHOLE, BlockRuns())
        self._digest = b""
        self._num_started = 0

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`. The ranks meet on the thread, as the first transfer begins."""
        self._selection = selection
        self._digest = _digest(selection)
        self._num_started = 0

    def _meet(self) -> None:
        """Wait for all ranks, and compare what they are about to move: a difference would be wrong KV."""
        greeting = _number(self._digest, 0)
        for peer in self._signals.peers:
            self._signals.send(peer, greeting)
        self._signals.expect(greeting)

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        assert self._digest, "a transfer was started before anything was prepared"
        self._num_started += 1
        blocks = self._selection.blocks
        if self._selection.way is Way.WHOLE:
            blocks = BlockRuns(((0, memory.components[0].shape[0]),))
        return self._thread.submit(
            partial(self._copy, memory, blocks, self._num_started),
            num_bytes=blocks.num_blocks * memory.page_size_bytes,
            num_calls=len(blocks.runs) * len(memory.components),
        )

    def _copy(self, memory: BundleMemory, blocks: BlockRuns, number: int) -> None:
        if number == 1:
            self._meet()
        receipt = _number(self._digest, number)
        if memory.owner_rank == self._rank:
            self._signals.expect(receipt)
            return
        for source, component in zip(memory.source, memory.components, strict=True):
            copy_blocks(source, blocks, component, blocks)
        self._signals.send(memory.owner_rank, receipt)


def _digest(selection: Selection) -> bytes:
    return hashlib.sha256(f"{selection.way.value} {selection.blocks.runs}".encode()).digest()[:8]


def _number(digest: bytes, number: int) -> bytes:
    """Name the step and the transfer, so that no message can be taken for another."""
    return digest + struct.pack("<I", number)
