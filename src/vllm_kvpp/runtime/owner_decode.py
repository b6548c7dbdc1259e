"""Decode rows attend to the owner's memory: every rank reads it in place, or their queries travel to the owner.

```text
in place      owner ─ write keys ─ tell ─┬─ every rank attends its own heads, in the owner's memory

at the owner
every rank    projections ─ query ─┐                                  ┌─ its heads' output ─ projections
owner                              └─ gather ─ attend all heads ─ scatter
```

The history stays where it is. With sparse attention, the owner alone scores the history and chooses from it; what it
chose is shared where a layer of another owner goes by it too. Whether a step attends so follows from the schedule, the
plan and the batch's split into decode rows and others, which are the same on every rank.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from vllm_kvpp.errors import KVPPOrderError, KVPPTransferError
from vllm_kvpp.plan.decode_place import DecodeCosts, DecodePlace, chooses_owner
from vllm_kvpp.runtime.counters import TransferCounters
from vllm_kvpp.runtime.decode_places import OwnedPlace, PlaceWalk
from vllm_kvpp.runtime.history import DecodeRows, DecodeShare, Step
from vllm_kvpp.runtime.ranges import EXCHANGE_RANGE, profile_range
from vllm_kvpp.selection import DecodeMode, TransferMode
from vllm_kvpp.transport.exchange import QueryExchange
from vllm_kvpp.transport.owner_reads import OwnerReads

Given = TypeVar("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class OwnerLinks:
    """What connects the ranks with an owner, as far as they have it.

    `exchange` needs memory for queries, and `reads` ranks that can read each other's memory.
    """

    exchange: QueryExchange | None = None
    reads: OwnerReads | None = None


class OwnerDecode:
    """Runs one rank's part, one step at a time; between steps, and in steps that move history instead, it is off.

    `places` are in the order of execution. With indexers, all rows of a batch attend at the owners, or none. `mode` may
    be exchanged between steps, on all ranks of the group alike. `warn` is told once when a step has too many rows.
    """

    def __init__(
        self,
        places: Sequence[OwnedPlace],
        links: OwnerLinks,
        costs: DecodeCosts,
        *,
        group_rank: int,
        group_label: str,
        mode: DecodeMode = "auto",
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.mode: DecodeMode = mode
        self._walk = PlaceWalk(places)
        self._links = links
        self._costs = costs
        self._group_rank = group_rank
        self._group_label = group_label
        self._warn = warn
        self._place = DecodePlace.EVERYWHERE
        self._num_rows = 0
        self._decodes_only = False
        self._last_written = ""

    @property
    def is_on(self) -> bool:
        """Whether the forward under way attends its decode rows to the owners' memory."""
        return self._place is not DecodePlace.EVERYWHERE

    @property
    def reads_in_place(self) -> bool:
        """Whether it does so at every rank, in place."""
        return self._place is DecodePlace.IN_PLACE

    @property
    def _exchange(self) -> QueryExchange:
        assert self._links.exchange is not None, "there is no exchange"
        return self._links.exchange

    @property
    def _reads(self) -> OwnerReads:
        assert self._links.reads is not None, "memory is not shared"
        return self._links.reads

    def before_step(self) -> None:
        """Wait, before anything is written, until every peer has read what it wanted of the last step.

        Raises:
            KVPPTransferError: a rank is gone, or did not come in time.
        """
        if self._links.reads is None:
            return
        try:
            self._links.reads.begin_step()
        except (TimeoutError, RuntimeError) as error:
            what = "Waiting until all ranks had read the last decode step's caches"
            raise self._make_failure(what, error) from error

    def begin(
        self, step: Step, rows: DecodeRows | None, transfer: TransferMode, counters: TransferCounters
    ) -> DecodeShare | None:
        """Decide for a forward, and switch on.

        Returns what is left to be moved by transfers; None if all of it is, and the forward goes without.

        Raises:
            KVPPTransferError: a step that failed has left the ranks at different places.
        """
        if rows is None:
            return None
        share = step.split_decodes(rows, most_attended=self._costs.queries.num_choices or None)
        # A rank that does not score has no choices for rows that it attends itself.
        if share is None or (self._costs.queries.num_choices > 0 and share.has_others):
            return None
        self._place = self._choose_place(step, share, transfer)
        if not self.is_on:
            return None
        self._num_rows = share.num_rows
        self._decodes_only = not share.has_others
        self._counters = counters
        if self.reads_in_place:
            self._reads.prepare(share.num_rows)
            counters.steps_in_place += 1
        else:
            self._prepare_exchange(share.num_rows)
            counters.steps_at_owner += 1
        return share

    def _prepare_exchange(self, num_rows: int) -> None:
        try:
            self._exchange.prepare(num_rows)
        except RuntimeError as error:
            raise self._make_failure("Preparing the exchange of decode queries", error) from error

    def _choose_place(self, step: Step, share: DecodeShare, transfer: TransferMode) -> DecodePlace:
        if self._links.reads is not None and self.mode in ("auto", "in_place"):
            # Each rank attends as without KVPP, and the one message a layer is less than either other way has.
            return DecodePlace.IN_PLACE
        if self.mode not in ("auto", "owner") or not self._fits_exchange(share.num_rows):
            return DecodePlace.EVERYWHERE
        is_at_owner = chooses_owner(
            self.mode,
            self._costs,
            num_rows=share.num_rows,
            num_attended_tokens=share.num_attended_tokens,
            active_blocks=step.active_blocks,
            other_blocks=share.other_blocks,
            transfer=transfer,
        )
        return DecodePlace.OWNER if is_at_owner else DecodePlace.EVERYWHERE

    def _fits_exchange(self, num_rows: int) -> bool:
        exchange = self._links.exchange
        if exchange is None or num_rows <= exchange.max_rows:
            return exchange is not None
        if self._warn is not None:
            self._warn(
                f"A step decodes {num_rows} rows, but only {exchange.max_rows} have room to attend at the owner, in a "
                "128th of the KV cache memory: such steps move history."
            )
            self._warn = None
        return False

    def leaves_cache_as_it_is(self, name: str) -> bool:
        """Whether nobody will read what this rank would write into its copy of the cache `name`.

        A peer then has its query ready while the owner still writes. Beside prompts everything is written as usual.
        """
        return self.is_on and self._decodes_only and self._walk.find_owner(name) != self._group_rank

    def before_write(self, name: str) -> None:
        """At the owner of the cache `name`, let the other ranks' queries arrive while it writes and projects.

        Raises:
            KVPPTransferError: a rank is gone.
        """
        # Beside prompts the others' queries come no earlier.
        if self._place is not DecodePlace.OWNER or not self._decodes_only:
            return
        # Behind an indexer, what it chose is shared first.
        if self._walk.find_owner(name) != self._group_rank or not self._walk.is_next(name):
            return
        try:
            self._exchange.begin_gather()
        except RuntimeError as error:
            raise self._make_failure(f"Beginning to gather the decode queries of {name}", error) from error

    def after_write(self, name: str) -> None:
        """Tell the readers that this rank has written the step's keys into its cache `name`, if it is the owner.

        Raises:
            KVPPOrderError: the cache is not the next in order.
            KVPPTransferError: a rank is gone.
        """
        if not self.reads_in_place or self._walk.find_owner(name) != self._group_rank:
            return
        self._walk.check_next(name)
        try:
            self._reads.tell_written(self._walk.num_passed)
        except RuntimeError as error:
            raise self._make_failure(f"Telling the other ranks that {name} is written", error) from error
        self._last_written = name

    def before_read(self, name: str, num_rows: int) -> None:
        """Wait until the cache `name` may be read in place at its owner, by the attention of `num_rows` decode rows.

        Raises:
            KVPPOrderError: the attention is not the next in order, has other rows than the step was planned for, or
                comes before its owner has written.
            KVPPTransferError: the owner is gone, or did not come in time.
        """
        number = self._walk.num_passed
        owner_rank = self._walk.pass_next(name).owner_rank
        self._check_rows(name, num_rows)
        if owner_rank == self._group_rank:
            if self._last_written != name:
                raise KVPPOrderError(
                    f"{name} attends in decode, but its owner has not written the step's keys through KVPP's hook: "
                    "other ranks would read what was there before. A fused operation passes the hook by."
                )
            return
        try:
            with profile_range(EXCHANGE_RANGE):
                self._reads.await_written(owner_rank, number)
        except (TimeoutError, RuntimeError) as error:
            raise self._make_failure(
                f"Waiting for the owner of {name}, rank {owner_rank}, to write it", error
            ) from error

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
        owner_rank = self._walk.pass_next(name).owner_rank
        self._check_rows(name, query[0].shape[0])
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
        place = self._walk.pass_next(name)
        if place.owner_rank == self._group_rank:
            score()
        if place.shares_choices:
            rows = choices[: self._num_rows]
            self._exchanged(name, self._exchange.share, place.owner_rank, rows)
            num_peers = self._costs.queries.group_size - 1 if place.owner_rank == self._group_rank else 1
            self._counters.choice_bytes += self._num_rows * num_peers * self._costs.queries.choice_bytes

    def _check_rows(self, name: str, num_rows: int) -> None:
        if num_rows != self._num_rows:
            raise KVPPOrderError(
                f"{name} attends {num_rows} decode rows, but the batch's metadata named {self._num_rows}: the history "
                "of the rest has not been moved."
            )

    def _exchanged(self, name: str, exchange: Callable[[int, Given], Result], owner_rank: int, given: Given) -> Result:
        try:
            with profile_range(EXCHANGE_RANGE):
                return exchange(owner_rank, given)
        except (TimeoutError, RuntimeError) as error:
            what = f"The exchange of decode queries with the owner of {name}, rank {owner_rank},"
            raise self._make_failure(what, error) from error

    def _make_failure(self, what: str, error: Exception) -> KVPPTransferError:
        return KVPPTransferError(
            f"{what} failed in the KVPP group {self._group_label}: {error}. A rank of the group is gone or stuck: see "
            "its log. If it needs longer, raise kvpp.transfer_timeout_seconds."
        )

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
        if self.is_on:
            self._walk.check_all_passed()

    def reset(self) -> None:
        """Switch off; called at the end of every step."""
        if self.reads_in_place:
            # The step's own error, if it has one, matters more; the next step meets this one.
            with suppress(RuntimeError):
                self._reads.tell_read()
        self._place = DecodePlace.EVERYWHERE
        self._last_written = ""
        self._num_rows = 0
        self._decodes_only = False
        self._walk.restart()
