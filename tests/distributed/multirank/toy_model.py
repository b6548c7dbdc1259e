"""A model in small whose every output depends on every byte of its history, as MLA's does, in exact integers.

The hidden state of a token is one int64. A layer writes rows made from it, the same on every rank, then adds up all
rows up to the token, each byte with a weight of its own. Weights are odd, so one wrong byte always shows.
"""

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from multirank.toy_scheduler import BLOCK_SIZE, Abort, ScheduledRequest, ToyStep

Hidden = dict[str, torch.Tensor]
Hook = Callable[[str], None]


@dataclass(frozen=True)
class ToyCache:
    """One cache of a layer; a page is padded to `BLOCK_SIZE * row_bytes + padding_bytes`."""

    name: str
    row_bytes: int
    padding_bytes: int = 0
    is_indexer: bool = False

    @property
    def page_size_bytes(self) -> int:
        """Bytes from one block to the next."""
        return BLOCK_SIZE * self.row_bytes + self.padding_bytes

    @property
    def seed(self) -> int:
        """A number that tells caches apart."""
        return zlib.crc32(self.name.encode())

    def view_rows(self, pages: torch.Tensor) -> torch.Tensor:
        """Turn `[num_blocks, page_size_bytes]` into `[num_blocks, BLOCK_SIZE, row_bytes]`, without the padding."""
        return pages[:, : BLOCK_SIZE * self.row_bytes].unflatten(1, (BLOCK_SIZE, self.row_bytes))


@dataclass(frozen=True)
class ToyLayer:
    """One layer; its caches are used in this order, so an indexer comes before the main cache."""

    caches: tuple[ToyCache, ...]
    is_draft: bool = False


class ForwardAbortedError(Exception):
    """Raised by the model itself, in the middle of a forward, on every rank."""


def make_layers(
    num_layers: int, *, first: int = 0, with_indexer: Collection[int] = (), num_drafts: int = 0, row_bytes: int = 6
) -> tuple[ToyLayer, ...]:
    """Target layers by number, some with an indexer cache of another page size, then draft layers."""
    layers: list[ToyLayer] = []
    for number in range(first, first + num_layers + num_drafts):
        prefix = f"model.layers.{number}.self_attn"
        caches = [ToyCache(f"{prefix}.attn", row_bytes)]
        if number in with_indexer:
            caches.insert(0, ToyCache(f"{prefix}.indexer.k_cache", row_bytes=3, padding_bytes=5, is_indexer=True))
        layers.append(ToyLayer(tuple(caches), is_draft=number >= first + num_layers))
    return tuple(layers)


class Attention:
    """Writes a step's new rows into one cache, and attends to it: here, on this rank."""

    def write(self, rows: torch.Tensor, step: ToyStep, hidden: Hidden, cache: ToyCache) -> None:
        """Write the rows of all requests."""
        for request in step.requests:
            write_rows(rows, request, make_rows(hidden[request.request_id], cache))

    def attend(self, rows: torch.Tensor, step: ToyStep, hidden: Hidden, cache: ToyCache) -> Hidden:
        """Return the hidden states of all requests behind the cache."""
        return attend_each(rows, step.requests, hidden, cache)


def attend_each(rows: torch.Tensor, requests: Sequence[ScheduledRequest], hidden: Hidden, cache: ToyCache) -> Hidden:
    """Attend some requests on this rank."""
    return {
        request.request_id: mix(hidden[request.request_id] + sum_history(rows, request, cache)) for request in requests
    }


def embed(step: ToyStep) -> Hidden:
    """The first layer's input: one number a new token, from its id and position."""
    return {request.request_id: _embed_tokens(request) for request in step.requests}


def run_layers(
    layers: Collection[ToyLayer],
    rows: Mapping[str, torch.Tensor],
    step: ToyStep,
    hidden: Hidden,
    *,
    before_write: Hook = lambda name: None,
    after_write: Hook = lambda name: None,
    attention: Attention | None = None,
) -> Hidden:
    """Run one forward over all requests; `rows` maps a cache name to its `[num_blocks, BLOCK_SIZE, row_bytes]`.

    The hooks are called with the name of each target cache, before its first write and before its first read.
    """
    attention = attention or Attention()
    for layer in layers:
        for cache in layer.caches:
            if not layer.is_draft:
                before_write(cache.name)
            attention.write(rows[cache.name], step, hidden, cache)
            if not layer.is_draft:
                after_write(cache.name)
            hidden = attention.attend(rows[cache.name], step, hidden, cache)
    return hidden


def abort_at(abort: Abort | None, layers: Collection[ToyLayer], before_write: Hook = lambda name: None) -> Hook:
    """Wrap the hook so that the forward raises where `abort` says."""
    if abort is None:
        return before_write
    target_layers = [layer for layer in layers if not layer.is_draft]
    first_cache = target_layers[abort.target_index].caches[0].name

    def before_write_or_abort(name: str) -> None:
        if name == first_cache and not abort.has_waited:
            raise ForwardAbortedError(name)
        before_write(name)
        if name == first_cache:
            raise ForwardAbortedError(name)

    return before_write_or_abort


def make_rows(hidden: torch.Tensor, cache: ToyCache) -> torch.Tensor:
    """The bytes that a layer keeps of its new tokens: `[num_tokens, row_bytes]` uint8."""
    columns = torch.arange(cache.row_bytes) + cache.seed
    return (mix(hidden[:, None] + mix(columns)) & 0xFF).to(torch.uint8)


def write_rows(rows: torch.Tensor, request: ScheduledRequest, new_rows: torch.Tensor) -> None:
    """Write the new tokens' rows into their slots."""
    positions = torch.arange(request.num_computed_tokens, request.num_tokens)
    blocks = torch.tensor(request.block_table)[positions // BLOCK_SIZE]
    rows[blocks, positions % BLOCK_SIZE] = new_rows


def sum_history(rows: torch.Tensor, request: ScheduledRequest, cache: ToyCache) -> torch.Tensor:
    """What each new token reads: all rows up to its own, added up."""
    history = rows[torch.tensor(request.block_table)].flatten(0, 1)[: request.num_tokens]
    positions = torch.arange(request.num_tokens)[:, None]
    weights = mix(positions * 4093 + torch.arange(cache.row_bytes) + cache.seed) | 1
    sums = (history.to(torch.int64) * weights).sum(dim=1).cumsum(dim=0)
    return sums[request.num_computed_tokens :]


def mix(values: torch.Tensor) -> torch.Tensor:
    """Scatter int64 values over their whole range, one to one."""
    values = (values ^ (values >> 31)) * -0x61C8864680B583EB
    values = (values ^ (values >> 29)) * 0x3C6EF372FE94F82B
    return values ^ (values >> 32)


def _embed_tokens(request: ScheduledRequest) -> torch.Tensor:
    positions = torch.arange(request.num_computed_tokens, request.num_tokens)
    return mix(torch.tensor(request.token_ids) * 65537 + positions)
