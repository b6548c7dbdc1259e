"""Queries and outputs through shared memory: each rank writes its own area and reads its peers'; signals say when.

```text
peer    write query ── tell ─┐                              ┌─ read its heads' output
owner   write query ─────────┴─ read all ── attend ── tell ─┘
```

A peer comes with its next query when it is done with the last output, so one area for each rank is enough.
"""

from collections.abc import Sequence

import torch

from vllm_kvpp.selection import ExchangeTraits
from vllm_kvpp.transport.exchange import ExchangeArea, write_query
from vllm_kvpp.transport.signals import Signals, make_message

# Two messages between processes, and vLLM's CPU kernel for one head and one token, in bytes that a core copies in the
# time.
PEER_EXCHANGE = ExchangeTraits(layer_bytes=500_000, head_token_bytes=270)


class PeerExchange:
    """Between ranks that can read each other's `areas`, which are by group rank."""

    traits = PEER_EXCHANGE

    def __init__(self, rank: int, areas: Sequence[ExchangeArea], signals: Signals) -> None:
        self._rank = rank
        self._areas = tuple(areas)
        self._own = self._areas[rank]
        self._signals = signals
        self._num_rows = 0
        self._num_messages = 0
        self._reply = b""
        self._cut_views()

    @property
    def max_rows(self) -> int:
        """See `QueryExchange.max_rows`."""
        return self._own.max_rows

    def prepare(self, num_rows: int) -> None:
        """See `QueryExchange.prepare`."""
        if num_rows != self._num_rows:
            for area in self._areas:
                area.cut(num_rows)
            self._cut_views()
        self._num_rows = num_rows
        self._num_messages = 0

    def _cut_views(self) -> None:
        """Cut what every attention needs once, since most of an exchange's time is the work around its few bytes."""
        own, heads_of = self._own, self._own.heads_of
        self._own_place = own.all_queries[:, heads_of(self._rank)]
        self._peer_places = [
            (own.all_queries[:, heads_of(peer)], self._areas[peer].own_query) for peer in self._signals.peers
        ]
        # By owner: this rank's heads' part of what it computes.
        self._outputs = [area.all_outputs[:, heads_of(self._rank)] for area in self._areas]

    def begin_gather(self) -> None:
        """See `QueryExchange.begin_gather`. Each rank writes its query into its own memory, whatever others do."""

    def gather(self, owner_rank: int, query: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See `QueryExchange.gather`."""
        message, self._reply = self._next_message(), self._next_message()
        if owner_rank != self._rank:
            write_query(query, self._own.own_query)
            self._signals.send(owner_rank, message)
            return None
        write_query(query, self._own_place)
        self._signals.expect(message)
        for place, peer_query in self._peer_places:
            place.copy_(peer_query)
        return self._own.all_queries

    def scatter(self, owner_rank: int, output: torch.Tensor | None) -> torch.Tensor:
        """See `QueryExchange.scatter`."""
        if output is None:
            self._signals.expect(self._reply, peers=(owner_rank,))
        else:
            self._own.all_outputs.copy_(output)
            for peer in self._signals.peers:
                self._signals.send(peer, self._reply)
        # Copied everywhere: a peer's memory is mapped for reading only, and a kernel behind it may choose its way by
        # strides, which are those without KVPP then.
        return self._own.own_output.copy_(self._outputs[owner_rank])

    def share(self, owner_rank: int, choices: torch.Tensor) -> None:
        """See `QueryExchange.share`. A peer has read the last choices when it comes with its next query."""
        message = self._next_message()
        if owner_rank != self._rank:
            self._signals.expect(message, peers=(owner_rank,))
            choices.copy_(self._areas[owner_rank].choices)
            return
        self._own.choices.copy_(choices)
        for peer in self._signals.peers:
            self._signals.send(peer, message)

    def _next_message(self) -> bytes:
        self._num_messages += 1
        return make_message(f"decode {self._num_rows}", self._num_messages)
