"""Several ranks in one process, beside a slow reference in which every rank keeps every layer."""

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvpp.plan import LayerCache, place, plan_cache
from vllm_kvpp.runtime.history import Step
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.selection import BlockRuns, LinkTraits, TransferSeconds
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.transport.recording import RecordedTransfer

NUM_BLOCKS = 3
ALL_BLOCKS = Step(BlockRuns.of(range(NUM_BLOCKS)))
GARBAGE = 255


@dataclass
class Wire:
    """Carries bundles between the ranks; a transfer lands as soon as all have started it, or at the first wait.

    Until then, its receivers' bytes are garbage.
    """

    num_ranks: int
    lands_early: bool
    transfers: list[list[BundleMemory]] = field(default_factory=list)

    def join(self, number, memory):
        """Take part in transfer `number`; ranks join in rank order."""
        if number == len(self.transfers):
            self.transfers.append([])
        memories = self.transfers[number]
        if len(memories) != memory.owner_rank:
            memory.whole.fill_(GARBAGE)
        memories.append(memory)
        if self.lands_early and len(memories) == self.num_ranks:
            self.land(number)

    def land(self, number):
        """Deliver transfer `number`, once: what its owner writes from here on does not travel."""
        memories, self.transfers[number] = self.transfers[number], []
        for memory in memories:
            memory.whole.copy_(memories[memory.owner_rank].whole)


@dataclass
class WireEnd:
    """The transport of one rank."""

    wire: Wire
    num_started: int = 0
    traits = LinkTraits(call_bytes=0)

    def prepare(self, selection):
        """Whatever is selected, the wire carries whole bundles."""

    def start(self, memory):
        self.wire.join(self.num_started, memory)
        self.num_started += 1
        return WireTransfer(self.wire, self.num_started - 1, memory.whole.numel())


@dataclass
class WireTransfer:
    wire: Wire
    number: int
    num_bytes: int
    num_calls = 1

    def wait(self):
        self.wire.land(self.number)

    def seconds(self):
        return TransferSeconds(0.0, 0.0)


def view_layers(placement):
    """The target layers of one rank in a buffer of their own."""
    # Zeroed by the system when touched: torch would start threads to fill the gap between the scratch buffers.
    backing = torch.frombuffer(bytearray(placement.num_bytes), dtype=torch.uint8)
    return tuple(
        TargetLayer(
            names=tuple(placed.cache.name for placed in bundle.components),
            memory=BundleMemory(
                bundle.owner_rank,
                backing[bundle.range.offset : bundle.range.end],
                tuple(
                    backing[placed.range.offset : placed.range.end].view(NUM_BLOCKS, -1) for placed in bundle.components
                ),
            ),
        )
        for bundle in placement.bundles
    )


class Ranks:
    """All ranks of one group, running forwards in lockstep beside the reference."""

    def __init__(self, plan, *, lands_early):
        wire = Wire(plan.group_size, lands_early)
        self.layers = [view_layers(place(plan, rank, NUM_BLOCKS)) for rank in range(plan.group_size)]
        self.transfers = [LayerTransfers(layers, WireEnd(wire), "under test") for layers in self.layers]
        self.reference = [[torch.zeros_like(view) for view in layer.memory.components] for layer in self.layers[0]]
        self.value = 0

    def run_step(self, *, has_history, block_id):
        """Write block `block_id` of every layer, and read what the forward may read: that one, with history all."""
        readable = slice(None) if has_history else slice(block_id, block_id + 1)
        with ExitStack() as steps:
            for transfers in self.transfers:
                steps.enter_context(transfers.step(ALL_BLOCKS if has_history else Step()))
                transfers.start_forward()
            for index in range(len(self.reference)):
                self.write_layer(index, block_id)
                self.check_layer(index, readable)

    def write_layer(self, index, block_id):
        self.value = (self.value + 1) % GARBAGE
        write(self.reference[index], block_id, self.value)
        for transfers, layers in zip(self.transfers, self.layers, strict=True):
            for name in layers[index].names:
                transfers.before_layer(name)
            write(layers[index].memory.components, block_id, self.value)

    def check_layer(self, index, readable):
        for layers in self.layers:
            for view, expected in zip(layers[index].memory.components, self.reference[index], strict=True):
                assert torch.equal(view[readable], expected[readable])


def write(views, block_id, value):
    for view in views:
        view[block_id] = value


def plan_stage(num_layers, group_size, sparse_layers=()):
    caches = [LayerCache(f"layers.{number}.attn", 4) for number in range(num_layers)]
    caches += [LayerCache(f"layers.{number}.indexer", 2) for number in sparse_layers if number < num_layers]
    return plan_cache(caches, group_size=group_size)


steps = st.lists(st.tuples(st.booleans(), st.integers(0, NUM_BLOCKS - 1)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(st.integers(1, 7), st.integers(1, 4), st.sets(st.integers(0, 6)), steps, st.booleans())
def test_every_rank_reads_what_it_would_read_if_it_kept_every_layer(
    num_layers, group_size, sparse_layers, steps, lands_early
):
    ranks = Ranks(plan_stage(num_layers, group_size, sparse_layers), lands_early=lands_early)
    for has_history, block_id in steps:
        ranks.run_step(has_history=has_history, block_id=block_id)


@dataclass
class NotedStarts:
    """Notes at each start how many layers were done; a layer is done when the next one is reached."""

    num_done: int = 0
    num_done_at_start: list[int] = field(default_factory=list)
    traits = LinkTraits(call_bytes=0)

    def prepare(self, selection):
        self.selection = selection

    def start(self, memory):
        self.num_done_at_start.append(self.num_done)
        return RecordedTransfer(memory, self.selection, log=[])


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 7))
def test_a_scratch_buffer_is_refilled_only_after_its_layer_is_done(num_layers, group_size, rank):
    transport = NotedStarts()
    layers = view_layers(place(plan_stage(num_layers, group_size), rank % group_size, NUM_BLOCKS))
    transfers = LayerTransfers(layers, transport, "under test")
    with transfers.step(ALL_BLOCKS):
        transfers.start_forward()
        for index, layer in enumerate(layers):
            transport.num_done = index
            transfers.before_layer(layer.names[0])

    # Layer i takes the buffer of layer i - 2, so layers 0 to i - 2 have to be done.
    assert len(transport.num_done_at_start) == num_layers
    assert all(num_done >= index - 1 for index, num_done in enumerate(transport.num_done_at_start))
