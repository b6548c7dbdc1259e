"""The toy model's caches on one rank: where KVPP puts them, and, for comparison, every layer in full."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from multirank.setups import TransferSetup
from multirank.toy_decode import ToyDecode, describe_queries, make_decode
from multirank.toy_group import Group
from multirank.toy_model import ForwardAbortedError, Hidden, ToyCache, ToyLayer, abort_at, run_layers
from multirank.toy_scheduler import BLOCK_SIZE, ToyStep
from multirank.transports import StrictTransport, unwrap
from vllm_kvpp.plan import CachePlan, LayerCache, PlacedCache, Placement, place, plan_cache
from vllm_kvpp.runtime.history import BlockTables, RequestUpdate, ScheduleUpdate
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.transport.shared_memory import PAGE_BYTES, allocate_pages

# Never what a row holds by chance in a whole block, and different on every rank.
_GARBAGE = 0xE0


class FullCaches:
    """The slow reference: every layer of every rank in full, and no transfer."""

    def __init__(self, layers: Sequence[ToyLayer], num_blocks: int) -> None:
        self._layers = layers
        self.caches = tuple(cache for layer in layers for cache in layer.caches)
        self.rows = {
            cache.name: cache.view_rows(torch.zeros(num_blocks, cache.page_size_bytes, dtype=torch.uint8))
            for cache in self.caches
        }
        self.is_written = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.bool)

    def run(self, step: ToyStep, hidden: Hidden) -> Hidden | None:
        """Run a forward; None when it aborts."""
        try:
            abort = abort_at(step.abort, self._layers)
            hidden = run_layers(self._layers, self.rows, step, hidden, before_write=abort)
        except ForwardAbortedError:
            return None
        for request in step.requests:
            positions = torch.arange(request.num_computed_tokens, request.num_tokens)
            blocks = torch.tensor(request.block_table)[positions // BLOCK_SIZE]
            self.is_written[blocks, positions % BLOCK_SIZE] = True
        return hidden


@dataclass(frozen=True)
class ToyMemory:
    """One rank's allocation, its own or a peer's, and what lies where in it."""

    placement: Placement
    backing: torch.Tensor

    def view_bundle(self, target_index: int) -> BundleMemory:
        """A target layer's bundle, by its place in execution order."""
        bundle = self.placement.bundles[target_index]
        whole = self.backing[bundle.range.offset : bundle.range.end]
        return BundleMemory(bundle.owner_rank, whole, tuple(map(self.view_pages, bundle.components)))

    def view_pages(self, placed: PlacedCache) -> torch.Tensor:
        """A cache as `[num_blocks, page_size_bytes]`."""
        return self.backing[placed.range.offset : placed.range.end].view(-1, placed.cache.page_size_bytes)

    def view_exchange(self, num_bytes: int) -> torch.Tensor:
        """The first bytes of the tail."""
        start = self.placement.tail.offset
        return self.backing[start : start + num_bytes]

    def view_staging(self, exchange_bytes: int) -> torch.Tensor | None:
        """The staging memory, which is the rest of the tail; None if there is none."""
        tail = self.placement.tail
        return self.backing[tail.offset + exchange_bytes : tail.end] if tail.num_bytes > exchange_bytes else None


class KVPPCaches:
    """One rank of a KVPP group: plan, placement and transfers on one backing allocation.

    `violations` lists what the product's block tables say other than the toy scheduler.
    """

    def __init__(
        self,
        layers: Sequence[ToyLayer],
        num_blocks: int,
        *,
        group: Group,
        setup: TransferSetup,
        waits_after_write: bool = False,
    ) -> None:
        self._layers = layers
        self.group_rank = group.rank
        self._waits_after_write = waits_after_write
        self.plan = plan_layers(layers, group_size=len(group.ranks))
        largest_page_bytes = self.plan.largest_bundle_page_bytes
        has_decode = setup.decode is not None and self.plan.bundles
        self._exchange_bytes = setup.decode.exchange_bytes(describe_queries(self.plan)) if has_decode else 0
        moving_bytes = PAGE_BYTES if setup.shares_memory else setup.staging_bytes(largest_page_bytes)
        self._tail_bytes = self._exchange_bytes + moving_bytes
        placement = place(self.plan, group.rank, num_blocks, self._tail_bytes)
        self._memory = ToyMemory(placement, allocate_pages(max(placement.num_bytes, 1)))
        # As in the product, a stage without caches has nothing to share.
        peers = self._map_peers(group) if setup.shares_memory and placement.bundles else ()
        self._memory.backing.fill_(_GARBAGE + group.rank)
        self.target_layers = tuple(self._view_layer(index, peers) for index in range(len(placement.bundles)))
        staging = self._memory.view_staging(self._exchange_bytes)
        self.transport = setup.make_transport(group, staging, largest_page_bytes)
        self._toy_decode = self._make_decode(group, setup, peers) if has_decode else None
        self.transfers = LayerTransfers(
            self.target_layers,
            self.transport,
            group.label,
            setup.transfer,
            self._toy_decode.decode if self._toy_decode is not None else None,
        )
        self._tables = BlockTables(BLOCK_SIZE)
        self.violations: list[str] = []
        self._rows = self._view_rows()

    def run(self, step: ToyStep, hidden: Hidden) -> Hidden | None:
        """Run a forward as a worker does; None when the model aborts it."""
        if step.is_dummy:
            return self._run_model(step, hidden)
        advanced = self._tables.advance(describe_schedule(step))
        if set(advanced.active_blocks) != step.active_blocks:
            self.violations.append(
                f"active blocks are {list(advanced.active_blocks)}, not {sorted(step.active_blocks)}"
            )
        try:
            with self.transfers.step(advanced):
                return self._run_model(step, hidden)
        except ForwardAbortedError:
            return None

    @property
    def strict_transports(self) -> list[StrictTransport]:
        """Those that look for violations, if any."""
        return [transport for transport in unwrap(self.transport) if isinstance(transport, StrictTransport)]

    def find_left_under_way(self) -> list[str]:
        """Transfers that nobody has waited for, as far as the transport knows."""
        num_left = sum(len(transport.under_way) for transport in self.strict_transports)
        return ["a transfer was left under way"] * num_left

    def find_stale_caches(self, reference: FullCaches) -> list[str]:
        """Persistent caches of this rank, drafts included, that differ from the reference in some written slot."""
        owned = {
            component.name for bundle in self.plan.owned_bundles(self.group_rank) for component in bundle.components
        }
        kept = owned | {cache.name for cache in self.plan.draft_caches}
        written = reference.is_written
        return [
            name for name in sorted(kept) if not torch.equal(self._rows[name][written], reference.rows[name][written])
        ]

    @property
    def owned_layers(self) -> tuple[int, ...]:
        """The layers that this rank keeps, by number."""
        return tuple(bundle.layer_number for bundle in self.plan.owned_bundles(self.group_rank))

    def _run_model(self, step: ToyStep, hidden: Hidden) -> Hidden:
        decode = self._toy_decode
        self.transfers.start_forward(decode.find_rows(step) if decode is not None else None)
        hook = abort_at(step.abort, self._layers, self.transfers.before_layer)
        if self._waits_after_write:
            return run_layers(self._layers, self._rows, step, hidden, after_write=hook, attention=decode)
        return run_layers(self._layers, self._rows, step, hidden, before_write=hook, attention=decode)

    def _make_decode(self, group: Group, setup: TransferSetup, peers: Sequence[ToyMemory]) -> ToyDecode:
        assert setup.decode is not None
        return make_decode(
            setup.decode,
            self.plan,
            self.target_layers,
            [cache for layer in self._layers if not layer.is_draft for cache in layer.caches],
            [memory.view_exchange(self._exchange_bytes) for memory in peers or (self._memory,)],
            group=group,
            link=self.transport.traits,
        )

    def _map_peers(self, group: Group) -> tuple[ToyMemory, ...]:
        num_blocks = self._memory.placement.num_blocks
        placements = [place(self.plan, rank, num_blocks, self._tail_bytes) for rank in range(len(group.ranks))]
        memories = map(ToyMemory, placements, group.share(self._memory.backing))
        # As in the product: this rank writes its own.
        return tuple(self._memory if rank == group.rank else memory for rank, memory in enumerate(memories))

    def _view_layer(self, target_index: int, peers: Sequence[ToyMemory]) -> TargetLayer:
        bundle = self._memory.placement.bundles[target_index]
        memory = self._memory.view_bundle(target_index)
        if peers and not bundle.is_owned:
            memory = replace(memory, source=peers[bundle.owner_rank].view_bundle(target_index).components)
        return TargetLayer(tuple(placed.cache.name for placed in bundle.components), memory)

    def _view_rows(self) -> dict[str, torch.Tensor]:
        cache_by_name: dict[str, ToyCache] = {cache.name: cache for layer in self._layers for cache in layer.caches}
        return {
            placed.cache.name: cache_by_name[placed.cache.name].view_rows(self._memory.view_pages(placed))
            for placed in self._memory.placement.caches
        }


def describe_schedule(step: ToyStep) -> ScheduleUpdate:
    """What the product hears of a step: of each request the blocks that it does not know yet."""
    updates = [
        RequestUpdate(
            request.request_id,
            request.num_computed_tokens,
            request.block_table[request.num_known_blocks :],
            replaces_blocks=request.num_known_blocks == 0,
            num_tokens=len(request.token_ids),
        )
        for request in step.requests
    ]
    return ScheduleUpdate(updates, step.finished)


def plan_layers(layers: Sequence[ToyLayer], *, group_size: int) -> CachePlan:
    """The product's plan for these layers."""
    return plan_cache(
        [LayerCache(cache.name, cache.page_size_bytes) for layer in layers for cache in layer.caches],
        group_size=group_size,
        draft_names={cache.name for layer in layers if layer.is_draft for cache in layer.caches},
    )
