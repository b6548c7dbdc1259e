"""Decode rows attend at each layer's owner: their queries are gathered there, and the outputs scattered.

```text
every rank    projections ─ query ─┐                                  ┌─ its heads' output ─ projections
owner                              └─ gather ─ attend all heads ─ scatter
```

The history stays where it is. With sparse attention, the owner alone scores the history and chooses from it; what it
chose is shared where a layer of another owner goes by it too. Whether a step attends so follows from the schedule, the
plan and the batch's split into decode rows and others, which are the same on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from vllm_kvpp.errors import KVPPOrderError, KVPPTransferError
from vllm_kvpp.plan.decode_place import DecodeCosts, chooses_owner
from vllm_kvpp.runtime.counters import TransferCounters
from vllm_kvpp.runtime.history import DecodeRows, DecodeShare, Step
from vllm_kvpp.runtime.ranges import EXCHANGE_RANGE, profile_range
from vllm_kvpp.selection import DecodeMode, TransferMode
from vllm_kvpp.transport.exchange import QueryExchange

Given = TypeVar("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class OwnedPlace:
    """An attention or an indexer of the stage's target layers, by the name of its cache.

    `shares_choices` is for indexers: whether other ranks need what it chose.
    """

    name: str
    owner_rank: int
    shares_choices: bool = False


class OwnerDecode:
    """Runs one rank's part, one step at a time; between steps, and in steps that move history instead, it is off.

    `places` are in the order of execution. With indexers, all rows of a batch attend at the owners, or none. `mode` may
    be exchanged between steps, on all ranks of the group alike. `warn` is told once when a step has too many rows.
    """

    def __init__(
        self,
        places: Sequence[OwnedPlace],
        exchange: QueryExchange,
        costs: DecodeCosts,
        *,
        group_rank: int,
        group_label: str,
        mode: DecodeMode = "auto",
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.mode: DecodeMode = mode
        self._places = tuple(places)
        self._exchange = exchange
        self._costs = costs
        self._group_rank = group_rank
        self._group_label = group_label
        self._warn = warn
        self._owner_ranks = {place.name: place.owner_rank for place in self._places}
        self._num_rows = 0
        self._decodes_only = False
        self._next_index = 0

    @property
    def is_on(self) -> bool:
        """Whether the forward under way attends its decode rows at the owners."""
        return self._num_rows > 0

    def begin(
        self, step: Step, rows: DecodeRows | None, transfer: TransferMode, counters: TransferCounters
    ) -> DecodeShare | None:
        """Decide for a forward, and switch on.

        Returns what is left to be moved by transfers; None if all of it is, and the forward goes without.
        """
        if rows is None:
            return None
        share = step.split_decodes(rows, most_attended=self._costs.queries.num_choices or None)
        if share is None or not self._fits(share) or not self._chooses(step, share, transfer):
            return None
        self._num_rows = share.num_rows
        self._decodes_only = not share.has_others
        self._next_index = 0
        self._counters = counters
        self._exchange.prepare(share.num_rows)
        counters.steps_at_owner += 1
        return share

    def _fits(self, share: DecodeShare) -> bool:
        # A rank that does not score has no choices for rows that it attends itself.
        if self._costs.queries.num_choices > 0 and share.has_others:
            return False
        if share.num_rows <= self._exchange.max_rows:
            return True
        if self._warn is not None and self.mode != "transfer":
            self._warn(
                f"A step decodes {share.num_rows} rows, but only {self._exchange.max_rows} have room to attend at the "
                "owner, in a 128th of the KV cache memory: such steps move history."
            )
            self._warn = None
        return False

    def _chooses(self, step: Step, share: DecodeShare, transfer: TransferMode) -> bool:
        return chooses_owner(
            self.mode,
            self._costs,
            num_rows=share.num_rows,
            num_attended_tokens=share.num_attended_tokens,
            active_blocks=step.active_blocks,
            other_blocks=share.other_blocks,
            transfer=transfer,
        )

    def leaves_cache_as_it_is(self, name: str) -> bool:
        """Whether nobody will read what this rank would write into its copy of the cache `name`.

        A peer then has its query ready while the owner still writes. Beside prompts everything is written as usual.
        """
        return self.is_on and self._decodes_only and self._owner_ranks[name] != self._group_rank

    def attend(
        self, name: str, query: Sequence[torch.Tensor], attend_all: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Attend the decode rows of the attention `name`, and return this rank's heads' output.

        `query` are the tensors that, put side by side, are this rank's `[num_rows, heads_per_rank, query_width]`;
        `attend_all` takes those of all heads to their outputs, and is called at the owner.

        Raises:
            KVPPOrderError: the attention is not the next in order, or has other rows than the step was planned for.
            KVPPTransferError: a rank is gone, or did not come in time.
        """
        owner_rank = self._next_place(name).owner_rank
        if query[0].shape[0] != self._num_rows:
            raise KVPPOrderError(
                f"{name} attends {query[0].shape[0]} decode rows, but the batch's metadata named {self._num_rows}: the "
                "history of the rest has not been moved."
            )
        all_queries = self._exchanged(name, self._exchange.gather, owner_rank, query)
        # What the kernel raises is its own.
        all_outputs = attend_all(all_queries) if all_queries is not None else None
        output = self._exchanged(name, self._exchange.scatter, owner_rank, all_outputs)
        self._count(owner_rank)
        return output

    def choose(self, name: str, choices: torch.Tensor, score: Callable[[], None]) -> None:
        """Fill the rows of `choices`, `[at least num_rows, num_choices]`, at the owner of the indexer `name`.

        `score` fills them from the indexer's cache. On other ranks they are filled if these need them, and void if not.

        Raises:
            KVPPOrderError: the indexer is not the next in order.
            KVPPTransferError: as of `attend`.
        """
        place = self._next_place(name)
        if place.owner_rank == self._group_rank:
            score()
        if place.shares_choices:
            rows = choices[: self._num_rows]
            self._exchanged(name, self._exchange.share, place.owner_rank, rows)
            num_peers = self._costs.queries.group_size - 1 if place.owner_rank == self._group_rank else 1
            self._counters.choice_bytes += self._num_rows * num_peers * self._costs.queries.choice_bytes

    def _next_place(self, name: str) -> OwnedPlace:
        place = self._places[self._next_index] if self._next_index < len(self._places) else None
        if place is None or place.name != name:
            expected = place.name if place is not None else "no further layer"
            raise KVPPOrderError(f"{name} was reached out of order in decode: KVPP expected {expected}.")
        self._next_index += 1
        return place

    def _exchanged(self, name: str, exchange: Callable[[int, Given], Result], owner_rank: int, given: Given) -> Result:
        try:
            with profile_range(EXCHANGE_RANGE):
                return exchange(owner_rank, given)
        except (TimeoutError, RuntimeError) as error:
            raise KVPPTransferError(
                f"The exchange of decode queries with the owner of {name}, rank {owner_rank}, failed in the KVPP group "
                f"{self._group_label}: {error}. A rank of the group is gone or stuck: see its log. If exchanges need "
                "longer, raise kvpp.transfer_timeout_seconds."
            ) from error

    def _count(self, owner_rank: int) -> None:
        queries = self._costs.queries
        num_heads = queries.num_peer_heads if owner_rank == self._group_rank else queries.heads_per_rank
        bytes_per_width = self._num_rows * num_heads * queries.element_bytes
        self._counters.exchanges += 1
        self._counters.query_bytes += bytes_per_width * queries.query_width
        self._counters.output_bytes += bytes_per_width * queries.output_width

    def check_all_attended(self) -> None:
        """Check at the end of a forward that no attention has read a cache that was not brought.

        Raises:
            KVPPOrderError: one has not come here.
        """
        if self.is_on and self._next_index < len(self._places):
            raise KVPPOrderError(
                f"{self._places[self._next_index].name} did not attend at its owner in this step, so its results are "
                "wrong. A recorded graph or a fused operation passes KVPP's hook by; run with --enforce-eager."
            )

    def reset(self) -> None:
        """Switch off; called at the end of every step."""
        self._num_rows = 0
        self._decodes_only = False
        self._next_index = 0
