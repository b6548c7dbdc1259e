"""Where a layer waits: the first place in a forward that touches any of its caches.

```text
an MLA layer by itself         projections ─▼─ cache update ── attend                 before the cache update
with an attention indexer      projections ─▼─ indexer ── cache update ── attend      before the indexer
with a forward of its own      ▼─ one kernel projects, writes both caches, … ──       before the layer
```
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

from vllm_kvpp.errors import KVPPSeamError


def in_order_of_access(names: tuple[str, ...], modules: Mapping[str, Any]) -> tuple[str, ...]:
    """Sort one layer's caches by when a forward first touches them: the indexer's, then the attention's."""
    return tuple(sorted(names, key=lambda name: (_updates_its_cache(modules[name]), name)))


def attach_waits(
    names: tuple[str, ...], modules: Mapping[str, Any], model: Any, before_layer: Callable[[str], None]
) -> None:
    """Call `before_layer` with each cache in `names`, those of one layer, just before it is touched.

    Touches: `MLAAttention.prepare_kv_cache_update`, `MLAAttention.forward`, `SparseAttnIndexer`. Because: see
    `symbols.py`. Checked by: `check_seam`, here for each layer, and in every step by `LayerTransfers`.

    Raises:
        KVPPSeamError: a cache has no place to wait before it.
    """
    ordered = in_order_of_access(names, modules)
    attentions = [name for name in ordered if _updates_its_cache(modules[name])]
    early = [name for name in ordered if name not in attentions]
    if not attentions:
        raise KVPPSeamError(
            f"KVPP has no place to wait before {early[-1]}: {type(modules[early[-1]]).__name__} has no "
            "prepare_kv_cache_update."
        )
    if _has_its_own_forward(modules[attentions[0]]):
        _wait_before_module(modules[attentions[0]], ordered, before_layer)
        return
    indexers = find_indexers(model) if early else {}
    for name in early:
        if name not in indexers or indexers[name].skip_k_cache_insert:
            raise KVPPSeamError(
                f"KVPP has no place to wait before {name}: no indexer of the model reads and writes it by itself."
            )
        _wait_before_module(indexers[name], (name,), before_layer)
    # A layer may hold several attentions, one behind the other.
    for name in attentions:
        _wait_before_cache_update(modules[name], name, before_layer)


def find_indexers(model: Any) -> dict[str, Any]:
    """The model's indexers, by the name of the cache that each reads."""
    return {module.k_cache.prefix: module for module in model.modules() if isinstance(module, SparseAttnIndexer)}


def _updates_its_cache(module: Any) -> bool:
    return hasattr(module, "prepare_kv_cache_update")


def _has_its_own_forward(module: Any) -> bool:
    return isinstance(module, MLAAttention) and type(module).forward is not MLAAttention.forward


def _wait_before_module(module: Any, names: tuple[str, ...], before_layer: Callable[[str], None]) -> None:
    def wait(_module: Any, _inputs: Any) -> None:
        for name in names:
            before_layer(name)

    module.register_forward_pre_hook(wait)


def _wait_before_cache_update(layer: Any, name: str, before_layer: Callable[[str], None]) -> None:
    original = layer.prepare_kv_cache_update

    @wraps(original)
    def prepare_kv_cache_update(attn_metadata: Any) -> None:
        before_layer(name)
        original(attn_metadata)

    layer.prepare_kv_cache_update = prepare_kv_cache_update
