"""The toy model's decode rows at each layer's owner, by the product's `OwnerDecode`: one head a rank.

The query of a row is its hidden state with a number added that is another one for each head, and the owner adds up the
history for every head. An indexer's cache is read at the owner alone: what it chose is the sum of its rows, which every
rank needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from multirank.exchanges import ExchangeWrap, PricedExchange
from multirank.toy_group import Group
from multirank.toy_model import Attention, Hidden, ToyCache, attend_each, mix, sum_history
from multirank.toy_scheduler import ScheduledRequest, ToyStep
from vllm_kvpp.plan import CachePlan, plan_exchange
from vllm_kvpp.plan.decode_place import DecodeCosts
from vllm_kvpp.runtime.history import DecodeRows
from vllm_kvpp.runtime.layer_transfers import TargetLayer, describe_stage
from vllm_kvpp.runtime.owner_decode import OwnedPlace, OwnerDecode
from vllm_kvpp.selection import DecodeMode, ExchangeTraits, LinkTraits, QueryShape
from vllm_kvpp.transport.exchange import ExchangeArea, QueryExchange

# One int64 is two numbers of an indexer.
_CHOICES_PER_ROW = 2
_GARBAGE = -0x5A5A5A5B


@dataclass(frozen=True)
class DecodeSetup:
    """Where decode rows attend; `wraps` go round the exchange from the inside out.

    A request with at most `most_tokens` new tokens decodes, and there is memory for about `num_rows` rows. With
    `auto`, one layer's exchange costs as much as one call of the transport. If `attends_here`, a rank is broken: it
    goes to the owner, but takes what its own memory holds.
    """

    mode: DecodeMode
    most_tokens: int = 1
    num_rows: int = 6
    attends_here: bool = False
    wraps: tuple[ExchangeWrap, ...] = ()

    def wrapped(self, *wraps: ExchangeWrap) -> Self:
        """The same with more round the exchange."""
        return replace(self, wraps=self.wraps + wraps)

    def exchange_bytes(self, shape: QueryShape) -> int:
        """The size of the exchange memory, as the product plans it out of so much that a 128th holds the rows."""
        return plan_exchange(shape, 128 * self.num_rows * shape.exchange_row_bytes)

    def wrap_exchange(self, exchange: QueryExchange, group_rank: int, link: LinkTraits) -> QueryExchange:
        """What goes round the exchange of one rank."""
        exchange = PricedExchange(exchange, ExchangeTraits(layer_bytes=link.call_bytes, head_token_bytes=4))
        for wrap in self.wraps:
            exchange = wrap(exchange, group_rank)
        return exchange

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
    """One rank's decode rows; `decode` is the product's."""

    def __init__(
        self, setup: DecodeSetup, shape: QueryShape, caches: Sequence[ToyCache], decode: OwnerDecode, group_rank: int
    ) -> None:
        self.decode = decode
        self._setup = setup
        self._names = {cache.name for cache in caches}
        self._salts = mix(torch.arange(1, shape.num_heads + 1))
        self._group_rank = group_rank
        # Longer than a step's rows, as vLLM's buffer is.
        self._choices = torch.empty(1024, _CHOICES_PER_ROW, dtype=torch.int32)

    def find_rows(self, step: ToyStep) -> DecodeRows:
        """What the batch's metadata would say."""
        lengths = [len(request.token_ids) for request in self._setup.list_decodes(step)]
        return DecodeRows(len(lengths), sum(lengths))

    def write(self, rows: torch.Tensor, step: ToyStep, hidden: Hidden, cache: ToyCache) -> None:
        """Write what somebody will read."""
        if cache.name not in self._names or not self.decode.leaves_cache_as_it_is(cache.name):
            super().write(rows, step, hidden, cache)

    def attend(self, rows: torch.Tensor, step: ToyStep, hidden: Hidden, cache: ToyCache) -> Hidden:
        """Attend decode rows at the owner and all others here."""
        if not self.decode.is_on or cache.name not in self._names:
            return attend_each(rows, step.requests, hidden, cache)
        decodes = self._setup.list_decodes(step)
        query = torch.cat([hidden[request.request_id] for request in decodes])
        sums = torch.cat([sum_history(rows, request, cache) for request in decodes])
        found = self._choose(query, sums, cache) if cache.is_indexer else self._attend_at_owner(query, sums, cache)
        outputs = found.split([len(request.token_ids) for request in decodes])
        others = attend_each(rows, self._setup.list_others(step), hidden, cache)
        return others | {request.request_id: output for request, output in zip(decodes, outputs, strict=True)}

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
    """Make one rank's, through the exchange memories of all ranks, or of this one. Collective.

    `caches` are those of the target layers, in execution order, as in `layers`.
    """
    owner_ranks = {name: layer.memory.owner_rank for layer in layers for name in layer.names}
    shape = describe_queries(plan)
    areas = [ExchangeArea(memory, shape, torch.int64) for memory in memories]
    exchange = setup.wrap_exchange(group.make_exchange(areas), group.rank, link)
    num_attentions = sum(not cache.is_indexer for cache in caches)
    decode = OwnerDecode(
        [OwnedPlace(cache.name, owner_ranks[cache.name], shares_choices=cache.is_indexer) for cache in caches],
        exchange,
        DecodeCosts(describe_stage(layers), num_attentions, shape, link, exchange.traits),
        group_rank=group.rank,
        group_label=group.label,
        mode=setup.mode,
    )
    return ToyDecode(setup, shape, caches, decode, group.rank)
