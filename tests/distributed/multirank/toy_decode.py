"""The toy model's decode rows at each layer's owner, or in its memory, by the product's `OwnerDecode`: one head a rank.

The query of a row is its hidden state with a number added that is another one for each head, and the owner adds up the
history for every head. An indexer's cache is read at the owner alone: what it chose is the sum of its rows, which every
rank needs. In place each rank adds up the history itself, from the owner's memory, for its own head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from multirank.exchanges import ExchangeWrap, PricedExchange
from multirank.reads import ReadsWrap
from multirank.toy_group import Group
from multirank.toy_model import Attention, Hidden, ToyCache, attend_each, mix, sum_history
from multirank.toy_scheduler import ScheduledRequest, ToyStep
from vllm_kvpp.plan import CachePlan, plan_exchange
from vllm_kvpp.plan.decode_place import DecodeCosts
from vllm_kvpp.runtime.decode_places import OwnedPlace
from vllm_kvpp.runtime.history import DecodeRows
from vllm_kvpp.runtime.layer_transfers import TargetLayer, describe_stage
from vllm_kvpp.runtime.owner_decode import OwnerDecode, OwnerLinks
from vllm_kvpp.selection import DecodeMode, ExchangeTraits, LinkTraits, QueryShape
from vllm_kvpp.transport.exchange import ExchangeArea, QueryExchange
from vllm_kvpp.transport.owner_reads import OwnerReads

# One int64 is two numbers of an indexer.
_CHOICES_PER_ROW = 2
_GARBAGE = -0x5A5A5A5B


@dataclass(frozen=True)
class DecodeSetup:
    """Where decode rows attend; `wraps` and `read_wraps` go round the exchange, and the reads, from the inside out.

    A request with at most `most_tokens` new tokens decodes. If `can_read_in_place`, in a group that shares memory and
    without indexers, the ranks read each other's memory, and there is no exchange. If not, there is memory for about
    `num_rows` rows; with `auto`, one layer's exchange costs as much as one call of the transport. If `attends_here`, a
    rank is broken: it goes to the owner, or waits for it, but takes what its own memory holds.
    """

    mode: DecodeMode
    most_tokens: int = 1
    num_rows: int = 6
    can_read_in_place: bool = False
    attends_here: bool = False
    wraps: tuple[ExchangeWrap, ...] = ()
    read_wraps: tuple[ReadsWrap, ...] = ()

    def wrapped(self, *wraps: ExchangeWrap) -> Self:
        """The same with more round the exchange."""
        return replace(self, wraps=self.wraps + wraps)

    def with_reads_wrapped(self, *wraps: ReadsWrap) -> Self:
        """The same with more round the reads."""
        return replace(self, read_wraps=self.read_wraps + wraps)

    def exchange_bytes(self, shape: QueryShape) -> int:
        """The size of the exchange memory, as the product plans it out of so much that a 128th holds the rows."""
        if self.can_read_in_place:
            return 0
        return plan_exchange(shape, 128 * self.num_rows * shape.exchange_row_bytes)

    def wrap_exchange(self, exchange: QueryExchange, group_rank: int, link: LinkTraits) -> QueryExchange:
        """What goes round the exchange of one rank."""
        exchange = PricedExchange(exchange, ExchangeTraits(layer_bytes=link.call_bytes, head_token_bytes=4))
        for wrap in self.wraps:
            exchange = wrap(exchange, group_rank)
        return exchange

    def wrap_reads(self, reads: OwnerReads, group_rank: int) -> OwnerReads:
        """What goes round the reads of one rank."""
        for wrap in self.read_wraps:
            reads = wrap(reads, group_rank)
        return reads

    def list_decodes(self, step: ToyStep) -> list[ScheduledRequest]:
        """The requests that decode."""
        return [request for request in step.requests if len(request.token_ids) <= self.most_tokens]

    def list_others(self, step: ToyStep) -> list[ScheduledRequest]:
        """The requests that do not."""
        return [request for request in step.requests if len(request.token_ids) > self.most_tokens]


def describe_queries(plan: CachePlan) -> QueryShape:
    """One head a rank; a query is two numbers wide, an output one."""
    chooses = any(len(bundle.components) > 1 for bundle in plan.bundles)
    return QueryShape(
        num_heads=plan.group_size,
        group_size=plan.group_size,
        query_width=2,
        output_width=1,
        element_bytes=torch.int64.itemsize,
        num_choices=_CHOICES_PER_ROW if chooses else 0,
    )


class ToyDecode(Attention):
    """One rank's decode rows; `decode` is the product's, `owner_rows` maps each target cache to its owner's rows."""

    def __init__(
        self,
        setup: DecodeSetup,
        shape: QueryShape,
        owner_rows: Mapping[str, torch.Tensor],
        decode: OwnerDecode,
        group_rank: int,
    ) -> None:
        self.decode = decode
        self._setup = setup
        self._owner_rows = owner_rows
        self._salts = mix(torch.arange(1, shape.num_heads + 1))
        self._group_rank = group_rank
        # Longer than a step's rows, as vLLM's buffer is.
        self._choices = torch.empty(1024, _CHOICES_PER_ROW, dtype=torch.int32)

    def find_rows(self, step: ToyStep) -> DecodeRows:
        """What the batch's metadata would say."""
        lengths = [len(request.token_ids) for request in self._setup.list_decodes(step)]
        return DecodeRows(len(lengths), sum(lengths))

    def write(self, rows: torch.Tensor, step: ToyStep, hidden: Hidden, cache: ToyCache) -> None:
        """Write what somebody will read, and tell who reads it in place."""
        if cache.name not in self._owner_rows:
            super().write(rows, step, hidden, cache)
            return
        if not cache.is_indexer:
            self.decode.before_write(cache.name)
        if not self.decode.leaves_cache_as_it_is(cache.name):
            super().write(rows, step, hidden, cache)
            self.decode.after_write(cache.name)

    def attend(self, rows: torch.Tensor, step: ToyStep, hidden: Hidden, cache: ToyCache) -> Hidden:
        """Attend decode rows at the owner, or in its memory, and all others here."""
        if not self.decode.is_on or cache.name not in self._owner_rows:
            return attend_each(rows, step.requests, hidden, cache)
        decodes = self._setup.list_decodes(step)
        others = attend_each(rows, self._setup.list_others(step), hidden, cache)
        if self.decode.reads_in_place:
            return others | self._attend_in_place(rows, decodes, hidden, cache)
        return others | self._exchange(rows, decodes, hidden, cache)

    def _attend_in_place(
        self, rows: torch.Tensor, decodes: Sequence[ScheduledRequest], hidden: Hidden, cache: ToyCache
    ) -> Hidden:
        self.decode.before_read(cache.name, sum(len(request.token_ids) for request in decodes))
        return attend_each(rows if self._setup.attends_here else self._owner_rows[cache.name], decodes, hidden, cache)

    def _exchange(
        self, rows: torch.Tensor, decodes: Sequence[ScheduledRequest], hidden: Hidden, cache: ToyCache
    ) -> Hidden:
        query = torch.cat([hidden[request.request_id] for request in decodes])
        sums = torch.cat([sum_history(rows, request, cache) for request in decodes])
        found = self._choose(query, sums, cache) if cache.is_indexer else self._attend_at_owner(query, sums, cache)
        outputs = found.split([len(request.token_ids) for request in decodes])
        return {request.request_id: output for request, output in zip(decodes, outputs, strict=True)}

    def _attend_at_owner(self, query: torch.Tensor, sums: torch.Tensor, cache: ToyCache) -> torch.Tensor:
        def attend_all(queries: torch.Tensor) -> torch.Tensor:
            return queries.sum(dim=2, keepdim=True) + sums[:, None, None]

        salt = self._salts[self._group_rank]
        parts = (query + salt)[:, None, None], (3 * salt).expand(len(query), 1, 1)
        output = self.decode.attend(cache.name, parts, attend_all)[:, 0, 0]
        return mix(query + sums if self._setup.attends_here else output - 4 * salt)

    def _choose(self, query: torch.Tensor, sums: torch.Tensor, cache: ToyCache) -> torch.Tensor:
        chosen = self._choices[: len(sums)].view(torch.int64)[:, 0]

        def score() -> None:
            chosen.copy_(sums)

        self._choices.fill_(_GARBAGE)
        self.decode.choose(cache.name, self._choices, score)
        return mix(query + chosen)


def make_decode(
    setup: DecodeSetup,
    plan: CachePlan,
    layers: Sequence[TargetLayer],
    caches: Sequence[ToyCache],
    memories: Sequence[torch.Tensor],
    *,
    group: Group,
    link: LinkTraits,
) -> ToyDecode:
    """Make one rank's, through the exchange memories of all ranks, or of this one, or by reads in place. Collective.

    `caches` are those of the target layers, in execution order, as in `layers`.
    """
    owner_ranks = {name: layer.memory.owner_rank for layer in layers for name in layer.names}
    shape = describe_queries(plan)
    links = _make_links(setup, shape, memories, group, link)
    num_attentions = sum(not cache.is_indexer for cache in caches)
    decode = OwnerDecode(
        [OwnedPlace(cache.name, owner_ranks[cache.name], shares_choices=cache.is_indexer) for cache in caches],
        links,
        DecodeCosts(
            describe_stage(layers), num_attentions, shape, link, links.exchange.traits if links.exchange else None
        ),
        group_rank=group.rank,
        group_label=group.label,
        mode=setup.mode,
    )
    return ToyDecode(setup, shape, _view_owners(layers, caches), decode, group.rank)


def _make_links(
    setup: DecodeSetup, shape: QueryShape, memories: Sequence[torch.Tensor], group: Group, link: LinkTraits
) -> OwnerLinks:
    if setup.can_read_in_place:
        return OwnerLinks(reads=setup.wrap_reads(group.make_reads(), group.rank))
    areas = [ExchangeArea(memory, shape, torch.int64) for memory in memories]
    return OwnerLinks(setup.wrap_exchange(group.make_exchange(areas), group.rank, link))


def _view_owners(layers: Sequence[TargetLayer], caches: Sequence[ToyCache]) -> dict[str, torch.Tensor]:
    pages_by_name = {
        name: pages
        for layer in layers
        for name, pages in zip(layer.names, layer.memory.source or layer.memory.components, strict=True)
    }
    return {cache.name: cache.view_rows(pages_by_name[cache.name]) for cache in caches}
