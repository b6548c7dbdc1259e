"""The KVPP group: its ranks and its communicators, made beside vLLM's own groups and shared with none of them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import ParallelConfig

from vllm_kvpp.errors import KVPPRankMismatchError
from vllm_kvpp.plan import split_into_groups
from vllm_kvpp.selection import QueryShape
from vllm_kvpp.transport.base import BundleMemory, Transport
from vllm_kvpp.transport.broadcast import HostBroadcast
from vllm_kvpp.transport.collective_exchange import CollectiveExchange
from vllm_kvpp.transport.exchange import ExchangeArea, QueryExchange
from vllm_kvpp.transport.owner_reads import OwnerReads
from vllm_kvpp.transport.peer_copies import PeerCopies
from vllm_kvpp.transport.peer_exchange import PeerExchange
from vllm_kvpp.transport.shared_memory import PAGE_BYTES, SharedHandle, allocate_pages, open_shared, share
from vllm_kvpp.transport.signals import Inbox, Signals, open_writer
from vllm_kvpp.transport.stream_broadcast import make_stream_broadcast

_PROBE_BYTES = 64
# Most attentions of a decode step end within it; vLLM's own collectives on CPU do not sleep at all.
EAGER_SECONDS = 0.005


@dataclass(frozen=True)
class KVPPGroup:
    """One group as one of its ranks sees it.

    `data` is what transfers run on, `queries` what decode queries and outputs do, if any, and `control` a gloo group
    for the checks at start-up. With `shares_memory`, every rank can read every other's memory once it has been shared.
    """

    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    timeout_seconds: float
    data: dist.ProcessGroup
    queries: dist.ProcessGroup | None
    control: dist.ProcessGroup
    shares_memory: bool

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @property
    def label(self) -> str:
        """How messages call the group: its world ranks."""
        return f"of ranks {list(self.ranks)}"

    def check_agreement(self, what: str, value: str | int) -> None:
        """Compare `value` over the group. Collective.

        Raises:
            KVPPRankMismatchError: on every rank, if the ranks differ.
        """
        values = self.gather(value)
        if len(set(values)) > 1:
            listing = ", ".join(f"rank {rank}: {found}" for rank, found in zip(self.ranks, values, strict=True))
            raise KVPPRankMismatchError(f"The KVPP group {self.label} does not agree on {what}: {listing}.")

    def gather(self, value: Any) -> list[Any]:
        """One value of each rank, by group rank. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make the storage under a host tensor shared, and map every rank's, by group rank. Collective; see `share`.

        Raises:
            KVPPRankMismatchError: on every rank, with what failed on each.
        """
        handles = self.gather(_try(partial(share, tensor)))
        self._raise_failures(handles)
        views = [_try(partial(open_shared, handle)) for handle in handles]
        # All have opened theirs behind this exchange.
        failures = self.gather(next((view for view in views if isinstance(view, _Failure)), None))
        os.close(handles[self.rank].fd)
        self._raise_failures(failures)
        return tuple(views)

    def _raise_failures(self, answers: list[Any]) -> None:
        failures = [
            f"rank {rank}: {answer.reason}"
            for rank, answer in zip(self.ranks, answers, strict=True)
            if isinstance(answer, _Failure)
        ]
        if failures:
            raise KVPPRankMismatchError(
                f"The KVPP group {self.label} cannot share memory between its processes: {', '.join(failures)}. Set "
                'kvpp.transport to "broadcast".'
            )

    def make_broadcast(self, staging: torch.Tensor | None = None, largest_page_bytes: int = 0) -> Transport:
        """Transfers by broadcast: on a thread for CPU, on a stream for everything else."""
        if self.device.type == "cpu":
            return HostBroadcast(self.data, self.timeout_seconds, staging, largest_page_bytes)
        return make_stream_broadcast(self.data, self.device, staging, largest_page_bytes)

    def make_peer_copies(self) -> Transport:
        """Transfers by copies from the owner's shared memory. Collective."""
        return PeerCopies(self.rank, self._make_signals(), self.timeout_seconds)

    def make_exchange(self, areas: Sequence[ExchangeArea]) -> QueryExchange:
        """The exchange of decode queries; `areas` are every rank's by group rank, or this rank's alone. Collective."""
        if self.shares_memory:
            return PeerExchange(self.rank, areas, self._make_signals(eager_seconds=EAGER_SECONDS))
        assert self.queries is not None, "decode queries have no group"
        (own,) = areas
        return CollectiveExchange(self.queries, own)

    def make_reads(self) -> OwnerReads:
        """The messages of ranks that read each other's memory in place. Collective."""
        assert self.shares_memory, "the ranks cannot read each other's memory"
        return OwnerReads(self._make_signals(eager_seconds=EAGER_SECONDS))

    def _make_signals(self, eager_seconds: float = 0.0) -> Signals:
        inbox = Inbox(tuple(peer for peer in range(self.size) if peer != self.rank))
        handles = self.gather(inbox.handles)
        writers = {
            peer: _try(partial(open_writer, offered[self.rank]))
            for peer, offered in enumerate(handles)
            if peer != self.rank
        }
        self._raise_failures(self.gather(next((end for end in writers.values() if isinstance(end, _Failure)), None)))
        inbox.close_writing()
        return Signals(inbox, writers, self.timeout_seconds, eager_seconds)


@dataclass(frozen=True)
class _Failure:
    reason: str


def _try(action: Callable[[], Any]) -> Any:
    """The result, or a `_Failure`: every rank has to come to the next collective."""
    try:
        return action()
    except (OSError, RuntimeError) as error:
        return _Failure(f"{type(error).__name__}: {error}")


def make_group(
    parallel: ParallelConfig,
    device: torch.device,
    timeout_seconds: float,
    *,
    may_share_memory: bool = True,
    may_exchange: bool = True,
) -> KVPPGroup:
    """Make every KVPP group of the world, and return this rank's. Collective over the whole world.

    The first transfer and exchange happen here, so that whatever the backend allocates is there before memory is
    profiled.
    """
    ranks_by_group = split_into_groups(
        dist.get_world_size(),
        data_parallel_size=parallel.data_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
    )
    # Making a group is a meeting of the whole world. Ranks may come to the first one minutes apart, which says nothing
    # about transfers: the control groups keep the backend's own limit, and come first.
    control_groups = [dist.new_group(list(ranks), backend="gloo") for ranks in ranks_by_group]
    timeout = timedelta(seconds=timeout_seconds)
    data_groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in ranks_by_group]
    # Of their own: the transfers of a step run beside the exchanges, on another thread or stream.
    query_groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in ranks_by_group if may_exchange]
    world_rank = dist.get_rank()
    index = next(index for index, ranks in enumerate(ranks_by_group) if world_rank in ranks)
    ranks = ranks_by_group[index]
    group = KVPPGroup(
        ranks=ranks,
        rank=ranks.index(world_rank),
        device=device,
        timeout_seconds=timeout_seconds,
        data=data_groups[index],
        queries=query_groups[index] if may_exchange else None,
        control=control_groups[index],
        shares_memory=False,
    )
    _probe(group)
    group = replace(group, shares_memory=may_share_memory and device.type == "cpu" and _can_share_memory(group))
    if may_exchange and not group.shares_memory:
        _probe_exchange(group)
    return group


def _probe(group: KVPPGroup) -> None:
    """Let every rank send a pattern of its own, and check that all arrive: a silent communicator means wrong KV."""
    transport = group.make_broadcast()
    for owner_rank in range(group.size):
        sent = _make_pattern(owner_rank, group.device)
        received = sent.clone() if owner_rank == group.rank else torch.zeros_like(sent)
        transport.start(BundleMemory(owner_rank, received, (received.view(1, -1),))).wait()
        if not torch.equal(received, sent):
            raise KVPPRankMismatchError(
                f"The KVPP group {group.label} does not deliver: a probe from rank {group.ranks[owner_rank]} did not "
                "arrive. Check the communication backend (NCCL, gloo, HCCL) and its settings."
            )


def _probe_exchange(group: KVPPGroup) -> None:
    """Let every rank be the owner once, and check that it gets each query, and each rank its part of the output."""
    shape = QueryShape(group.size, group.size, query_width=1, output_width=1, element_bytes=1)
    area = torch.zeros(shape.exchange_row_bytes, dtype=torch.uint8, device=group.device)
    exchange = group.make_exchange([ExchangeArea(area, shape, torch.uint8)])
    exchange.prepare(num_rows=1)
    own = _make_pattern(group.rank, group.device)[:1].view(1, 1, 1)
    for owner_rank in range(group.size):
        queries = exchange.gather(owner_rank, (own,))
        returned = exchange.scatter(owner_rank, queries)
        if not torch.equal(returned, own):
            raise KVPPRankMismatchError(
                f"The KVPP group {group.label} does not deliver: a probe that went to rank {group.ranks[owner_rank]} "
                "did not come back. Check the communication backend (NCCL, gloo, HCCL) and its settings."
            )


def _make_pattern(rank: int, device: torch.device) -> torch.Tensor:
    return torch.full((_PROBE_BYTES,), rank + 1, dtype=torch.uint8, device=device)


def _share_pattern(rank: int, pages: torch.Tensor) -> SharedHandle:
    handle = share(pages)
    pages[:_PROBE_BYTES] = rank + 1
    return handle


def _can_share_memory(group: KVPPGroup) -> bool:
    """Whether every rank can read a pattern in every other's shared memory. Collective."""
    pages = allocate_pages(PAGE_BYTES)
    handles = group.gather(_try(partial(_share_pattern, group.rank, pages)))
    can_share = all(group.gather(all(_reads_pattern(rank, handle) for rank, handle in enumerate(handles))))
    if not isinstance(own := handles[group.rank], _Failure):
        os.close(own.fd)
    return can_share


def _reads_pattern(rank: int, handle: SharedHandle | _Failure) -> bool:
    view = handle if isinstance(handle, _Failure) else _try(partial(open_shared, handle))
    return not isinstance(view, _Failure) and torch.equal(view[:_PROBE_BYTES], _make_pattern(rank, view.device))
