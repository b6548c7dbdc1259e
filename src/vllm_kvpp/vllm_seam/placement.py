"""Cache specs in, KV cache tensors out: the plan in vLLM's terms."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVCacheTensor, MLAAttentionSpec

from vllm_kvpp.errors import KVPPConfigError, KVPPSeamError
from vllm_kvpp.plan import LayerCache, PlacedBundle, PlacedCache, Placement
from vllm_kvpp.runtime.layer_transfers import TargetLayer
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.vllm_seam.wait_points import in_order_of_access


def describe_caches(specs: Mapping[str, KVCacheSpec], draft_names: Set[str] = frozenset()) -> tuple[LayerCache, ...]:
    """Translate vLLM's cache specs.

    Raises:
        KVPPConfigError: a layer's cache is of another kind than MLA.
    """
    foreign = {name: type(spec).__name__ for name, spec in specs.items() if type(spec) is not MLAAttentionSpec}
    kinds = ", ".join(sorted(set(foreign.values())))
    if foreign and foreign.keys() <= draft_names:
        raise KVPPConfigError(
            [
                "KVPP supports draft layers with MLA caches only. "
                f"(the draft model has caches of the kind {kinds}; remove --speculative-config)"
            ]
        )
    if foreign:
        raise KVPPConfigError(
            [
                f"KVPP currently supports only non-hybrid MLA models. "
                f"(the model has caches of the kind {kinds}; set enable_kvpp to false)"
            ]
        )
    return tuple(LayerCache(name, _block_stride(spec)) for name, spec in specs.items())


def _block_stride(spec: KVCacheSpec) -> int:
    alignment = spec.get_block_stride_alignment()
    return -(-spec.page_size_bytes // alignment) * alignment


def rewrite_tensors(config: KVCacheConfig, placement: Placement) -> KVCacheConfig:
    """Return the configuration with every cache where the plan puts it, in one allocation of the plan's size."""
    return replace(config, kv_cache_tensors=[_make_tensor(placed, placement) for placed in placement.caches])


def _make_tensor(placed: PlacedCache, placement: Placement) -> KVCacheTensor:
    # One layer a tensor, layer outermost: the block stride is the page, so vLLM may still split blocks for a kernel.
    return KVCacheTensor(
        size=placement.num_bytes,
        layers=[placed.cache.name],
        layer_stride=placed.range.num_bytes,
        block_stride=placed.cache.page_size_bytes,
        offset=placed.range.offset,
    )


def find_backing(placement: Placement, layers: Mapping[str, Any]) -> torch.Tensor:
    """The backing allocation as `[num_bytes]` uint8, after checking that every cache lies where the plan puts it.

    `layers` maps cache names to the modules that hold them, as `kv_cache`.

    Raises:
        KVPPSeamError: vLLM placed a cache elsewhere.
    """
    storages = {layers[placed.cache.name].kv_cache.untyped_storage().data_ptr() for placed in placement.caches}
    if len(storages) != 1:
        raise KVPPSeamError(f"vLLM spread the KV cache over {len(storages)} allocations; KVPP placed it in one.")
    any_cache: torch.Tensor = layers[placement.caches[0].cache.name].kv_cache
    storage = any_cache.untyped_storage()
    backing = torch.empty(0, dtype=torch.uint8, device=any_cache.device).set_(storage, 0, (storage.nbytes(),))
    for placed in placement.caches:
        _check_place(placed, layers[placed.cache.name].kv_cache, backing)
    return backing


def _check_place(placed: PlacedCache, cache: torch.Tensor, backing: torch.Tensor) -> None:
    offset = cache.data_ptr() - backing.data_ptr()
    last_byte = offset + sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True)) * (
        cache.element_size()
    )
    if offset != placed.range.offset or not placed.range.offset <= last_byte < placed.range.end <= backing.numel():
        raise KVPPSeamError(
            f"vLLM placed {placed.cache.name} at bytes [{offset}, {last_byte}] of the KV cache allocation; KVPP "
            f"planned [{placed.range.offset}, {placed.range.end})."
        )


@dataclass(frozen=True)
class RankMemory:
    """One rank's allocation as `[num_bytes]` uint8, its own or a peer's that it can read, and what lies where in it."""

    placement: Placement
    backing: torch.Tensor

    def view_bundle(self, target_index: int) -> BundleMemory:
        """A target layer's bundle, by its place in execution order."""
        bundle = self.placement.bundles[target_index]
        whole = self.backing[bundle.range.offset : bundle.range.end]
        components = tuple(self._view_cache(placed) for placed in bundle.components)
        return BundleMemory(bundle.owner_rank, whole, components)

    def view_pages(self, name: str) -> torch.Tensor:
        """The pages of the cache `name` as `[num_bytes]`; those of a layer that another rank owns are its scratch."""
        (placed,) = (placed for placed in self.placement.caches if placed.cache.name == name)
        return self.backing[placed.range.offset : placed.range.end]

    def view_exchange(self, num_bytes: int) -> torch.Tensor:
        """The first bytes of the tail, through which decode queries and outputs travel."""
        start = self.placement.tail.offset
        return self.backing[start : start + num_bytes]

    def view_staging(self, exchange_bytes: int = 0) -> torch.Tensor | None:
        """The staging memory, which is the rest of the tail; None if there is none."""
        tail = self.placement.tail
        return self.backing[tail.offset + exchange_bytes : tail.end] if tail.num_bytes > exchange_bytes else None

    def _view_cache(self, placed: PlacedCache) -> torch.Tensor:
        pages = self.backing[placed.range.offset : placed.range.end]
        return pages.view(self.placement.num_blocks, placed.cache.page_size_bytes)


def view_layers(
    own: RankMemory, layers: Mapping[str, Any], peers: Sequence[RankMemory] = ()
) -> tuple[TargetLayer, ...]:
    """The target layers in execution order, with the memory that their transfers use.

    `layers` maps cache names to the modules that hold them; `peers` holds every rank's memory, if this rank can read
    it.
    """
    return tuple(
        _view_layer(target_index, bundle, own, layers, peers)
        for target_index, bundle in enumerate(own.placement.bundles)
    )


def _view_layer(
    target_index: int, bundle: PlacedBundle, own: RankMemory, layers: Mapping[str, Any], peers: Sequence[RankMemory]
) -> TargetLayer:
    names = tuple(placed.cache.name for placed in bundle.components)
    memory = own.view_bundle(target_index)
    if peers and not bundle.is_owned:
        memory = replace(memory, source=peers[bundle.owner_rank].view_bundle(target_index).components)
    return TargetLayer(names, memory, entry=in_order_of_access(names, layers)[0])
