"""Where decode rows meet the owner: around an attention's kernel, its cache update, and an indexer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from vllm_kvpp.errors import KVPPSeamError
from vllm_kvpp.runtime.decode_places import OwnedPlace
from vllm_kvpp.runtime.history import DecodeRows
from vllm_kvpp.runtime.owner_decode import OwnerDecode
from vllm_kvpp.selection import QueryShape
from vllm_kvpp.vllm_seam.owner_view import OwnerView
from vllm_kvpp.vllm_seam.wait_points import find_indexers


@dataclass(frozen=True)
class DecodePlaces:
    """The attentions and indexers of a stage's target layers, by the names of their caches, in execution order."""

    attentions: Mapping[str, Any]
    indexers: Mapping[str, Any]
    places: tuple[OwnedPlace, ...]


def find_attentions(names: Sequence[str], modules: Mapping[str, Any]) -> dict[str, Any]:
    """The attention modules among the modules that hold the caches `names`, in this order; indexers are none."""
    return {name: modules[name] for name in names if hasattr(getattr(modules[name], "impl", None), "forward_mqa")}


def find_places(
    names: Sequence[str], owner_ranks: Mapping[str, int], modules: Mapping[str, Any], model: Any, *, has_drafts: bool
) -> DecodePlaces:
    """Find where the layers of the caches `names`, in execution order, attend and choose.

    Drafts may go by what the target's indexers chose, on every rank.
    """
    attentions = find_attentions(names, modules)
    indexers = {name: indexer for name, indexer in find_indexers(model).items() if name in names}
    places: list[OwnedPlace] = []
    chooser: int | None = None
    for name in names:
        if name in indexers:
            chooser = len(places)
            places.append(OwnedPlace(name, owner_ranks[name], shares_choices=has_drafts))
        elif name in attentions:
            if chooser is not None and places[chooser].owner_rank != owner_ranks[name]:
                places[chooser] = replace(places[chooser], shares_choices=True)
            places.append(OwnedPlace(name, owner_ranks[name]))
    return DecodePlaces(attentions, indexers, tuple(places))


def find_sparse_obstacle(names: Sequence[str], places: DecodePlaces) -> str | None:
    """Say why sparse attention cannot attend at the owner in these layers, or None if it can."""
    is_sparse = any(attention.impl.is_sparse for attention in places.attentions.values())
    if not is_sparse:
        return None
    if names[0] not in places.indexers:
        return "the first layer of this pipeline stage goes by what an earlier stage has chosen"
    types = {indexer.topk_indices_buffer.dtype for indexer in places.indexers.values()}
    return None if types == {torch.int32} else f"its indexers choose in {types}"


def find_indexer_obstacle(places: DecodePlaces) -> str | None:
    """Say why decode cannot read in place in these layers, or None if it can."""
    is_sparse = bool(places.indexers) or any(attention.impl.is_sparse for attention in places.attentions.values())
    return "its indexers choose at the owner, and other ranks do not know what" if is_sparse else None


def describe_queries(places: DecodePlaces, group_size: int, dtype: torch.dtype) -> QueryShape:
    """Describe the decode queries that the attentions, which are alike, have in common."""
    first = next(iter(places.attentions.values()))
    buffers = [indexer.topk_indices_buffer for indexer in places.indexers.values()]
    return QueryShape(
        num_heads=first.num_heads * group_size,
        group_size=group_size,
        query_width=first.head_size,
        output_width=first.kv_lora_rank,
        element_bytes=dtype.itemsize,
        num_choices=max((buffer.shape[1] for buffer in buffers), default=0),
    )


def attach_owner_decode(
    places: DecodePlaces, decode: OwnerDecode, dtype: torch.dtype, views: Mapping[str, OwnerView]
) -> None:
    """Let each attention's decode rows attend to its owner's memory, and each indexer choose there, if `decode` is on.

    `views` are those of the caches that other ranks own, by name, if decode rows may read in place.

    Touches: `forward_mqa` and `do_kv_cache_update` of the attention's implementation, `SparseAttnIndexer`. Because: see
    `symbols.py`. Checked by: `check_seam`, and in every step by `OwnerDecode`.
    """
    for name, attention in places.attentions.items():
        _wrap_decode(name, attention.impl, decode, dtype, views.get(name, _as_it_is))
        _wrap_cache_update(name, attention.impl, decode)
    for name, indexer in places.indexers.items():
        _wrap_indexer(name, indexer, decode)


def _as_it_is(cache: torch.Tensor) -> torch.Tensor:
    return cache


def _wrap_decode(
    name: str,
    impl: Any,
    decode: OwnerDecode,
    dtype: torch.dtype,
    view_at_owner: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    original = impl.forward_mqa

    @wraps(original)
    def forward_mqa(q: Any, kv_cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
        if not decode.is_on:
            return original(q, kv_cache, metadata, layer)
        query = q if isinstance(q, tuple) else (q,)
        if decode.reads_in_place:
            decode.before_read(name, query[0].shape[0])
            return original(q, view_at_owner(kv_cache), metadata, layer)
        if others := [part.dtype for part in query if part.dtype != dtype]:
            raise KVPPSeamError(f"The decode queries of {name} are {others[0]}; KVPP planned for {dtype}.")
        # The second is the logarithm of the sum of weights, which only decode context parallelism reads: refused.
        return decode.attend(name, query, lambda heads: original(heads, kv_cache, metadata, layer)[0]), None

    impl.forward_mqa = forward_mqa


def _wrap_cache_update(name: str, impl: Any, decode: OwnerDecode) -> None:
    original = impl.do_kv_cache_update

    @wraps(original)
    def do_kv_cache_update(*args: Any, **kwargs: Any) -> None:
        decode.before_write(name)
        if not decode.leaves_cache_as_it_is(name):
            original(*args, **kwargs)
            decode.after_write(name)

    impl.do_kv_cache_update = do_kv_cache_update


def _wrap_indexer(name: str, indexer: Any, decode: OwnerDecode) -> None:
    original = indexer.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not decode.is_on:
            return original(*args, **kwargs)
        decode.choose(name, indexer.topk_indices_buffer, lambda: original(*args, **kwargs))
        return indexer.topk_indices_buffer

    indexer.forward = forward


def find_decode_rows(names: Sequence[str]) -> DecodeRows | None:
    """The decode rows of the batch under way, from its attention metadata; None if it does not say, or not in one way.

    Touches: `get_forward_context`, `MLACommonMetadata.num_decodes`, `.num_decode_tokens`. Because: see `symbols.py`.
    Checked by: `check_seam`; what it says is held against the schedule, and the rows that attend against it.
    """
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):
        # With drafts, the first is the target's.
        metadata = metadata[0]
    if not isinstance(metadata, Mapping):
        return None
    found = {_describe_rows(metadata.get(name)) for name in names}
    return found.pop() if len(found) == 1 else None


def _describe_rows(metadata: Any) -> DecodeRows | None:
    num_requests = getattr(metadata, "num_decodes", None)
    num_rows = getattr(metadata, "num_decode_tokens", None)
    return DecodeRows(num_requests, num_rows) if num_requests is not None and num_rows is not None else None
