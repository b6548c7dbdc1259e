import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from vllm_kvpp.selection import QueryShape
from vllm_kvpp.transport import collective_exchange
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.transport.collective_exchange import CollectiveExchange
from vllm_kvpp.transport.exchange import ExchangeArea
from vllm_kvpp.transport.peer_exchange import PeerExchange
from vllm_kvpp.transport.signals import Inbox, Signals, open_writer

PAGES = (6, 2)


@pytest.fixture
def make_memory():
    """A bundle of two components with 8 blocks each; at a receiver all zero, at the owner different everywhere."""

    def make_memory(*, owner_rank=0, is_owner=True, pages=PAGES, num_blocks=8):
        whole = torch.zeros(num_blocks * sum(pages), dtype=torch.uint8)
        if is_owner:
            whole.copy_(torch.arange(1, whole.numel() + 1) % 251)
        parts = whole.split([num_blocks * page for page in pages])
        return BundleMemory(owner_rank, whole, tuple(part.view(num_blocks, -1) for part in parts))

    return make_memory


GROUP_SIZE = 3
SHAPE = QueryShape(num_heads=6, group_size=GROUP_SIZE, query_width=3, output_width=4, element_bytes=4, num_choices=2)
MAX_ROWS = 8


@dataclass
class ExchangeRanks:
    """The exchanges of all ranks of a group, each a thread of this process, with memory for eight rows."""

    exchanges: list
    signals: list = field(default_factory=list)

    def prepare(self, num_rows):
        for exchange in self.exchanges:
            exchange.prepare(num_rows)

    def run_everywhere(self, call):
        """Run `call(rank)` on each rank at once, and return the results, or the errors."""
        with ThreadPoolExecutor(GROUP_SIZE) as pool:
            futures = [pool.submit(call, rank) for rank in range(GROUP_SIZE)]
            return [future.exception() or future.result() for future in futures]

    def make_query(self, rank, num_rows, seed=0):
        """A rank's queries in two parts; every number is another one, by rank, row, head and place."""
        whole = torch.arange(num_rows * 2 * 3, dtype=torch.float32).view(num_rows, 2, 3) + 1000 * rank + 10_000 * seed
        return whole[..., :1], whole[..., 1:]

    def all_queries(self, num_rows, seed=0):
        """What an owner has to get."""
        queries = [torch.cat(self.make_query(rank, num_rows, seed), dim=-1) for rank in range(GROUP_SIZE)]
        return torch.cat(queries, dim=1)

    def expected_output(self, rank, num_rows, seed=0):
        """What a rank has to get: its query, and a number made of it."""
        query = torch.cat(self.make_query(rank, num_rows, seed), dim=-1)
        return torch.cat((query, query[..., :1] + 0.5), dim=-1)

    def attend(self, rank, owner_rank, num_rows, seed=0):
        """One attention on one rank; return the gathered queries, None but at the owner, and the rank's output."""
        gathered = self.exchanges[rank].gather(owner_rank, self.make_query(rank, num_rows, seed))
        if gathered is not None:
            gathered = gathered.clone()
        output = None if gathered is None else torch.cat((gathered, gathered[..., :1] + 0.5), dim=-1)
        return gathered, self.exchanges[rank].scatter(owner_rank, output).clone()

    def attend_everywhere(self, owner_rank, num_rows, seed=0):
        """One attention on all ranks."""
        return self.run_everywhere(partial(self.attend, owner_rank=owner_rank, num_rows=num_rows, seed=seed))


def make_areas():
    memories = [torch.zeros(MAX_ROWS * SHAPE.exchange_row_bytes, dtype=torch.uint8) for _ in range(GROUP_SIZE)]
    # As in separate processes, each rank has views of its own.
    return [[ExchangeArea(memory, SHAPE, torch.float32) for memory in memories] for _ in range(GROUP_SIZE)]


@pytest.fixture
def make_signals():
    """The signals of all ranks of a group, with real pipes between them."""

    def make_signals(timeout_seconds=5.0):
        others = [tuple(peer for peer in range(GROUP_SIZE) if peer != rank) for rank in range(GROUP_SIZE)]
        inboxes = list(map(Inbox, others))
        writers = [
            {peer: open_writer(inboxes[peer].handles[rank]) for peer in others[rank]} for rank in range(GROUP_SIZE)
        ]
        for inbox in inboxes:
            inbox.close_writing()
        return [Signals(*ends, timeout_seconds) for ends in zip(inboxes, writers, strict=True)]

    return make_signals


@pytest.fixture
def make_peer_ranks(make_signals):
    """Ranks that read each other's memory."""

    def make_peer_ranks(timeout_seconds=5.0):
        signals = make_signals(timeout_seconds)
        return ExchangeRanks(list(map(PeerExchange, range(GROUP_SIZE), make_areas(), signals)), signals)

    return make_peer_ranks


class FakeCollectives:
    """Stands in for `torch.distributed`: carries tensors between threads, and as gloo only contiguous ones."""

    ProcessGroup = object

    def __init__(self):
        self._barrier = threading.Barrier(GROUP_SIZE, timeout=5)
        self._tensors = [None] * GROUP_SIZE
        self.calls = []
        self.works = {}
        self._pool = ThreadPoolExecutor(GROUP_SIZE)

    def get_rank(self, group):
        return group.rank

    def give_up(self):
        """Let nobody wait any longer."""
        self._barrier.abort()

    def gather(self, tensor, gather_list=None, *, group, group_dst, async_op=False):
        assert (gather_list is not None) == (group.rank == group_dst) == async_op
        self._note("gather", group, tensor, *(gather_list or ()))
        if not async_op:
            return self._gather(tensor, (), group)
        work = self.works[group.rank] = self._pool.submit(self._gather, tensor, gather_list, group)
        return SimpleNamespace(wait=work.result)

    def _gather(self, tensor, gather_list, group):
        self._tensors[group.rank] = tensor
        self._barrier.wait()
        for target, sent in zip(gather_list, self._tensors, strict=bool(gather_list)):
            target.copy_(sent)
        self._barrier.wait()

    def scatter(self, tensor, scatter_list=None, *, group, group_src):
        assert (scatter_list is not None) == (group.rank == group_src)
        self._note("scatter", group, tensor, *(scatter_list or ()))
        if scatter_list is not None:
            self._tensors = scatter_list
        self._barrier.wait()
        tensor.copy_(self._tensors[group.rank])
        self._barrier.wait()

    def broadcast(self, tensor, *, group, group_src):
        self._note("broadcast", group, tensor)
        self._tensors[group.rank] = tensor
        self._barrier.wait()
        tensor.copy_(self._tensors[group_src])
        self._barrier.wait()

    def _note(self, call, group, *tensors):
        assert all(tensor.is_contiguous() for tensor in tensors)
        self.calls.append((group.rank, call))


@pytest.fixture
def collectives(monkeypatch):
    """What the collectives of `make_collective_ranks` run on."""
    collectives = FakeCollectives()
    monkeypatch.setattr(collective_exchange, "dist", collectives)
    return collectives


@pytest.fixture
def make_collective_ranks(collectives):
    """Ranks that use collectives, each with its own memory alone."""

    def make_collective_ranks():
        groups = [SimpleNamespace(rank=rank) for rank in range(GROUP_SIZE)]
        areas = [areas[rank] for rank, areas in enumerate(make_areas())]
        return ExchangeRanks(list(map(CollectiveExchange, groups, areas)))

    return make_collective_ranks
