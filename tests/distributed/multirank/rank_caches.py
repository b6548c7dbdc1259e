"""The toy model's caches on one rank: where KVPP puts them, and, for comparison, every layer in full."""

from collections.abc import Sequence

import torch

from multirank.toy_model import ForwardAbortedError, Hidden, ToyCache, ToyLayer, abort_at, run_layers
from multirank.toy_scheduler import BLOCK_SIZE, ToyStep
from multirank.transports import StrictTransport
from vllm_kvpp.plan import CachePlan, LayerCache, PlacedBundle, place, plan_cache
from vllm_kvpp.runtime.history import Step
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.transport.base import BundleMemory, Transport

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


class KVPPCaches:
    """One rank of a KVPP group: plan, placement and transfers on one backing allocation."""

    def __init__(
        self,
        layers: Sequence[ToyLayer],
        num_blocks: int,
        *,
        group_ranks: tuple[int, ...],
        group_rank: int,
        transport: Transport,
        waits_after_write: bool = False,
    ) -> None:
        self._layers = layers
        self.group_rank = group_rank
        self._waits_after_write = waits_after_write
        self.plan = plan_layers(layers, group_size=len(group_ranks))
        self._placement = place(self.plan, group_rank, num_blocks)
        self._backing = torch.full((self._placement.num_bytes,), _GARBAGE + group_rank, dtype=torch.uint8)
        self.transport = transport
        self.target_layers = self._view_target_layers()
        self.transfers = LayerTransfers(self.target_layers, transport, f"of ranks {list(group_ranks)}")
        self._rows = self._view_rows()

    def run(self, step: ToyStep, hidden: Hidden) -> Hidden | None:
        """Run a forward as a worker does; None when the model aborts it."""
        if step.is_dummy:
            return self._run_model(step, hidden)
        computed = {request.request_id: request.num_computed_tokens for request in step.requests}
        try:
            with self.transfers.step(Step(computed)):
                return self._run_model(step, hidden)
        except ForwardAbortedError:
            return None

    def find_left_under_way(self) -> list[str]:
        """Transfers that nobody has waited for, as far as the transport knows."""
        if not isinstance(self.transport, StrictTransport):
            return []
        return ["a transfer was left under way"] * len(self.transport.under_way)

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
        self.transfers.start_forward()
        hook = abort_at(step.abort, self._layers, self.transfers.before_layer)
        if self._waits_after_write:
            return run_layers(self._layers, self._rows, step, hidden, after_write=hook)
        return run_layers(self._layers, self._rows, step, hidden, before_write=hook)

    def _view_rows(self) -> dict[str, torch.Tensor]:
        cache_by_name: dict[str, ToyCache] = {cache.name: cache for layer in self._layers for cache in layer.caches}
        return {
            placed.cache.name: cache_by_name[placed.cache.name].view_rows(
                self._view_pages(placed.range.offset, placed.cache)
            )
            for placed in self._placement.caches
        }

    def _view_target_layers(self) -> list[TargetLayer]:
        return [
            TargetLayer(tuple(placed.cache.name for placed in bundle.components), self._view_bundle(bundle))
            for bundle in self._placement.bundles
        ]

    def _view_bundle(self, bundle: PlacedBundle) -> BundleMemory:
        components = tuple(self._view_pages(placed.range.offset, placed.cache) for placed in bundle.components)
        return BundleMemory(bundle.owner_rank, self._backing[bundle.range.offset : bundle.range.end], components)

    def _view_pages(self, offset: int, cache: LayerCache) -> torch.Tensor:
        num_bytes = self._placement.num_blocks * cache.page_size_bytes
        return self._backing[offset : offset + num_bytes].view(-1, cache.page_size_bytes)


def plan_layers(layers: Sequence[ToyLayer], *, group_size: int) -> CachePlan:
    """The product's plan for these layers."""
    return plan_cache(
        [LayerCache(cache.name, cache.page_size_bytes) for layer in layers for cache in layer.caches],
        group_size=group_size,
        draft_names={cache.name for layer in layers if layer.is_draft for cache in layer.caches},
    )
