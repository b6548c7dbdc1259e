"""A KVPP group in real processes, made as the product makes one, but without vLLM around it."""

import os
import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vllm_kvpp.transport.base import Transport
from vllm_kvpp.transport.broadcast import HostBroadcast
from vllm_kvpp.transport.collective_exchange import CollectiveExchange
from vllm_kvpp.transport.exchange import ExchangeArea, QueryExchange
from vllm_kvpp.transport.owner_reads import OwnerReads
from vllm_kvpp.transport.peer_copies import PeerCopies
from vllm_kvpp.transport.peer_exchange import PeerExchange
from vllm_kvpp.transport.shared_memory import open_shared, share
from vllm_kvpp.transport.signals import Inbox, Signals, open_writer


class Group(Protocol):
    """What caches need of a group; the product's own `KVPPGroup` offers it too."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's world ranks."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def label(self) -> str:
        """How messages call the group."""

    def share(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make the storage under a tensor shared, and map every rank's, by group rank. Collective."""

    def make_broadcast(self, staging: torch.Tensor | None = None, largest_page_bytes: int = 0) -> Transport:
        """Transfers by broadcast."""

    def make_peer_copies(self) -> Transport:
        """Transfers by copies from the owner's shared memory. Collective."""

    def make_exchange(self, areas: Sequence[ExchangeArea]) -> QueryExchange:
        """The exchange of decode queries through every rank's area, or this rank's and collectives. Collective."""

    def make_reads(self) -> OwnerReads:
        """The messages of ranks that read each other's shared memory in place. Collective."""


class MakeSignals(Protocol):
    """`Signals` or a class that stands in for it."""

    def __call__(self, inbox: Inbox, writers: Mapping[int, int], timeout_seconds: float) -> Signals:
        """Make the signals of one rank."""


@dataclass(frozen=True)
class ToyGroup:
    """One group as one of its ranks sees it; `make_signals` says what peers wait by for each other."""

    ranks: tuple[int, ...]
    rank: int
    data: dist.ProcessGroup
    queries: dist.ProcessGroup
    timeout_seconds: float
    make_signals: MakeSignals = Signals

    @property
    def label(self) -> str:
        """See `Group`."""
        return f"of ranks {list(self.ranks)}"

    def gather(self, value: Any) -> list[Any]:
        """One value of each rank, by group rank. Collective."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.data)
        return values

    def share(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See `Group`."""
        own = share(tensor)
        views = tuple(open_shared(handle) for handle in self.gather(own))
        # A handle is good until its rank closes it: none goes on before all have opened theirs.
        self.gather("opened")
        os.close(own.fd)
        return views

    def make_broadcast(self, staging: torch.Tensor | None = None, largest_page_bytes: int = 0) -> Transport:
        """See `Group`."""
        return HostBroadcast(self.data, self.timeout_seconds, staging, largest_page_bytes)

    def make_peer_copies(self) -> Transport:
        """See `Group`."""
        return PeerCopies(self.rank, self._connect(), self.timeout_seconds)

    def make_exchange(self, areas: Sequence[ExchangeArea]) -> QueryExchange:
        """See `Group`."""
        if len(areas) > 1:
            return PeerExchange(self.rank, areas, self._connect())
        return CollectiveExchange(self.queries, areas[0])

    def make_reads(self) -> OwnerReads:
        """See `Group`."""
        return OwnerReads(self._connect())

    def _connect(self) -> Signals:
        peers = tuple(peer for peer in range(len(self.ranks)) if peer != self.rank)
        inbox = Inbox(peers)
        offered = self.gather(inbox.handles)
        writers = {peer: open_writer(offered[peer][self.rank]) for peer in peers}
        self.gather("opened")
        inbox.close_writing()
        return self.make_signals(inbox, writers, self.timeout_seconds)


class SlowSignals(Signals):
    """Lets time pass behind each signal: copies come late, and each rank is ahead at times."""

    def __init__(self, inbox: Inbox, writers: Mapping[int, int], timeout_seconds: float) -> None:
        super().__init__(inbox, writers, timeout_seconds)
        # The peers tell ranks apart, so each has delays of its own.
        self._generator = random.Random(str(sorted(writers)))

    def send(self, peer: int, message: bytes) -> None:
        """See `Signals.send`."""
        super().send(peer, message)
        self._pause()

    def expect(self, message: bytes, peers: Collection[int] | None = None) -> None:
        """See `Signals.expect`."""
        super().expect(message, peers)
        self._pause()

    def _pause(self) -> None:
        time.sleep(self._generator.choice((0, 0, 0, 0.003)))


class DeafSignals(SlowSignals):
    """Broken: takes every message for arrived, so that nobody waits for anybody."""

    def expect(self, message: bytes, peers: Collection[int] | None = None) -> None:
        """Return at once."""
        self._pause()
