"""Receivers copy the blocks from the owner's memory themselves; signals only say when.

```text
owner     prepare ──── meet ─┐                            write layer n
receiver  prepare ──── meet ─┴─ copy layer n ── tell the owner ─┘
```

Each rank comes to `prepare` when what it wrote in earlier steps is written, so after the meeting all bundles may be
read. An owner writes a bundle again when every receiver has told it that it has its copy.
"""

from functools import partial

from vllm_kvpp.selection import BlockRuns, LinkTraits, Selection, Way
from vllm_kvpp.transport.base import BundleMemory, PendingTransfer
from vllm_kvpp.transport.block_copies import copy_blocks
from vllm_kvpp.transport.signals import Signals, make_message
from vllm_kvpp.transport.transfer_thread import TransferThread


class PeerCopies:
    """Transfers between ranks that can read each other's memory; every bundle needs its `source` at the receivers."""

    # A copy call takes about a microsecond, in which several kilobytes are copied; handing a layer to the thread,
    # receipts and waking up some tenths of a millisecond.
    traits = LinkTraits(call_bytes=4_096, layer_bytes=1_500_000)

    def __init__(self, rank: int, signals: Signals, timeout_seconds: float) -> None:
        self._rank = rank
        self._signals = signals
        self._thread = TransferThread(timeout_seconds)
        self._selection = Selection(Way.WHOLE, BlockRuns())
        self._subject = ""
        self._num_started = 0

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`. The ranks meet on the thread, as the first transfer begins."""
        self._selection = selection
        self._subject = f"{selection.way.value} {selection.blocks.runs}"
        self._num_started = 0

    def _meet(self) -> None:
        """Wait for all ranks, and compare what they are about to move: a difference would be wrong KV."""
        greeting = make_message(self._subject, 0)
        for peer in self._signals.peers:
            self._signals.send(peer, greeting)
        self._signals.expect(greeting)

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        assert self._subject, "a transfer was started before anything was prepared"
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
        receipt = make_message(self._subject, number)
        if memory.owner_rank == self._rank:
            self._signals.expect(receipt)
            return
        for source, component in zip(memory.source, memory.components, strict=True):
            copy_blocks(source, blocks, component, blocks)
        self._signals.send(memory.owner_rank, receipt)
