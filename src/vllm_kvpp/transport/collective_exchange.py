"""Queries and outputs by the group's collectives: gather and scatter, on the current stream where there are streams."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from vllm_kvpp.selection import ExchangeTraits
from vllm_kvpp.transport.exchange import ExchangeArea, write_query

# gloo between processes of one machine: two calls of about 0.3 ms, in bytes of its link.
GLOO_EXCHANGE = ExchangeTraits(layer_bytes=600_000, head_token_bytes=60)


class CollectiveExchange:
    """One gather and one scatter an attention, on a group that nothing else uses."""

    def __init__(self, group: dist.ProcessGroup, area: ExchangeArea, traits: ExchangeTraits = GLOO_EXCHANGE) -> None:
        self.traits = traits
        self._group = group
        self._rank = dist.get_rank(group)
        self._area = area
        self._arriving: dist.Work | None = None

    @property
    def max_rows(self) -> int:
        """See `QueryExchange.max_rows`."""
        return self._area.max_rows

    def prepare(self, num_rows: int) -> None:
        """See `QueryExchange.prepare`."""
        if self._arriving is not None:
            raise RuntimeError("the gather of a step that failed is still under way")
        self._area.cut(num_rows)

    def begin_gather(self) -> None:
        """See `QueryExchange.begin_gather`. The own part of what is gathered is void."""
        area = self._area
        assert self._arriving is None, "the last gather has not ended"
        # group_dst, not dst: an owner rank counts inside the KVPP group.
        self._arriving = dist.gather(
            area.own_query, list(area.queries_by_rank), group=self._group, group_dst=self._rank, async_op=True
        )

    def gather(self, owner_rank: int, query: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See `QueryExchange.gather`."""
        area = self._area
        if owner_rank != self._rank:
            write_query(query, area.own_query)
            dist.gather(area.own_query, group=self._group, group_dst=owner_rank)
            return None
        if self._arriving is None:
            self.begin_gather()
        write_query(query, area.all_queries[:, area.heads_of(self._rank)])
        arriving, self._arriving = self._arriving, None
        assert arriving is not None, "an asynchronous call without a handle"
        arriving.wait()
        for rank, queries in enumerate(area.queries_by_rank):
            if rank != self._rank:
                area.all_queries[:, area.heads_of(rank)].copy_(queries)
        return area.all_queries

    def scatter(self, owner_rank: int, output: torch.Tensor | None) -> torch.Tensor:
        """See `QueryExchange.scatter`."""
        area = self._area
        if output is None:
            dist.scatter(area.own_output, group=self._group, group_src=owner_rank)
            return area.own_output
        for rank, outputs in enumerate(area.outputs_by_rank):
            outputs.copy_(output[:, area.heads_of(rank)])
        dist.scatter(area.own_output, list(area.outputs_by_rank), group=self._group, group_src=owner_rank)
        return area.own_output

    def share(self, owner_rank: int, choices: torch.Tensor) -> None:
        """See `QueryExchange.share`."""
        shared = self._area.choices
        if owner_rank == self._rank:
            shared.copy_(choices)
        dist.broadcast(shared, group=self._group, group_src=owner_rank)
        if owner_rank != self._rank:
            choices.copy_(shared)
