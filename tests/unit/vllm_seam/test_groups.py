from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from vllm_kvpp.errors import KVPPRankMismatchError
from vllm_kvpp.vllm_seam import groups as groups_module
from vllm_kvpp.vllm_seam.groups import KVPPGroup, make_group

CPU = torch.device("cpu")


class FakeWorld:
    """Stands in for `torch.distributed`: writes down the groups that are made, and answers for all ranks."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size
        self.made = []
        self.values = []
        self.answers = None

    def get_rank(self):
        return self.rank

    def get_world_size(self):
        return self.size

    def new_group(self, ranks, timeout=None, backend=None):
        self.made.append((tuple(ranks), backend, timeout))
        return self.made[-1]

    def all_gather_object(self, values, value, group):
        self.values.append((value, group))
        values[:] = self.answers or [value] * len(values)


class FakeTransport:
    """Delivers what every owner sends, or nothing at all; `owners` are the senders in order."""

    def __init__(self, *, delivers=True):
        self.delivers = delivers
        self.owners = []

    def prepare(self, selection):
        """Nothing to prepare."""

    def start(self, memory):
        self.owners.append(memory.owner_rank)

        def wait():
            if self.delivers:
                memory.whole.fill_(memory.owner_rank + 1)

        return SimpleNamespace(num_bytes=memory.whole.numel(), wait=wait)


class FakeExchange:
    """Brings each query back, or nothing; `owners` are those to which queries went, in order."""

    def __init__(self, *, delivers=True):
        self.delivers = delivers
        self.owners = []
        self.made_from = ()

    def make(self, group, area):
        self.made_from = (group, area)
        return self

    def prepare(self, num_rows):
        """Nothing to prepare."""

    def gather(self, owner_rank, query):
        self.owners.append(owner_rank)
        self.own = query[0]

    def scatter(self, owner_rank, output):
        return self.own if self.delivers else torch.zeros_like(self.own)


def control_group(*ranks):
    return ranks, "gloo", None


@pytest.fixture
def make(monkeypatch):
    """Make the groups of a world as one of its ranks, with a fake transport and a fake exchange."""

    def make(rank=0, *, size=4, tp=2, pp=1, transport=None, exchange=None, **options):
        world, transport, exchange = FakeWorld(rank, size), transport or FakeTransport(), exchange or FakeExchange()
        monkeypatch.setattr(groups_module, "dist", world)
        monkeypatch.setattr(groups_module, "HostBroadcast", lambda *args: transport)
        monkeypatch.setattr(groups_module, "CollectiveExchange", exchange.make)
        sizes = SimpleNamespace(
            data_parallel_size=1,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=1,
            tensor_parallel_size=tp,
        )
        return make_group(sizes, CPU, timeout_seconds=7.0, **({"may_share_memory": False} | options)), world

    return make


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_takes_part_in_making_every_group_in_the_same_order(make, rank):
    _, world = make(rank, pp=2)

    assert sorted((ranks, backend or "default") for ranks, backend, _ in world.made) == [
        ((0, 1), "default"),
        ((0, 1), "default"),
        ((0, 1), "gloo"),
        ((2, 3), "default"),
        ((2, 3), "default"),
        ((2, 3), "gloo"),
    ]
    assert world.made == make(0, pp=2)[1].made


def test_ranks_first_meet_under_the_limit_of_the_backend(make):
    _, world = make(pp=2)

    assert [timeout for _, _, timeout in world.made] == [None] * 2 + [timedelta(seconds=7)] * 4


@pytest.mark.parametrize(
    ("rank", "ranks", "group_rank"), [(0, (0, 1), 0), (1, (0, 1), 1), (2, (2, 3), 0), (3, (2, 3), 1)]
)
def test_a_rank_gets_the_group_that_it_is_in(make, rank, ranks, group_rank):
    group, _ = make(rank, pp=2)

    assert (group.ranks, group.rank, group.size) == (ranks, group_rank, 2)


def test_transfers_have_the_users_timeout_and_checks_at_start_up_that_of_the_backend(make):
    _, world = make()

    assert {(backend, timeout) for _, backend, timeout in world.made} == {(None, timedelta(seconds=7)), ("gloo", None)}


def test_checks_run_on_the_control_group(make):
    group, world = make(2, pp=2)
    group.check_agreement("the cache plan", "abc")

    assert world.values == [("abc", control_group(2, 3))]


def test_a_group_is_called_by_its_world_ranks(make):
    group, _ = make(3, pp=2)

    assert group.label == "of ranks [2, 3]"


def test_ranks_that_differ_are_all_named(make):
    group, world = make(2, pp=2)
    world.answers = [11_650, 11_633]

    with pytest.raises(KVPPRankMismatchError) as caught:
        group.check_agreement("the number of blocks", 11_650)
    assert str(caught.value) == (
        "The KVPP group of ranks [2, 3] does not agree on the number of blocks: rank 2: 11650, rank 3: 11633."
    )


def test_every_rank_sends_a_probe_when_the_group_is_made(make):
    transport = FakeTransport()
    make(tp=4, transport=transport)

    assert transport.owners == [0, 1, 2, 3]


def test_a_communicator_that_delivers_nothing_stops_the_start(make):
    with pytest.raises(KVPPRankMismatchError, match=r"of ranks \[0, 1\] does not deliver: a probe from rank 1 did not"):
        make(0, size=2, transport=FakeTransport(delivers=False))


def test_a_lost_probe_is_named_by_the_world_rank_of_its_sender(make):
    with pytest.raises(KVPPRankMismatchError, match="a probe from rank 2 did not arrive"):
        make(3, pp=2, transport=FakeTransport(delivers=False))


def test_queries_travel_on_a_group_that_transfers_do_not_use(make):
    exchange = FakeExchange()
    group, world = make(2, pp=2, exchange=exchange)

    assert exchange.made_from[0] is group.queries
    # The second of the groups with the user's timeout that are made for these ranks.
    assert [made is group.queries for made in world.made if made[:2] == ((2, 3), None)] == [False, True]


def test_every_rank_is_the_owner_of_a_probe_of_queries_when_the_group_is_made(make):
    exchange = FakeExchange()
    make(tp=4, exchange=exchange)

    assert exchange.owners == [0, 1, 2, 3]


def test_an_exchange_that_delivers_nothing_stops_the_start(make):
    with pytest.raises(
        KVPPRankMismatchError,
        match=r"of ranks \[2, 3\] does not deliver: a probe that went to rank 2 did not come back",
    ):
        make(3, pp=2, exchange=FakeExchange(delivers=False))


def test_a_group_that_is_not_to_exchange_probes_no_exchange(make):
    exchange = FakeExchange()
    make(exchange=exchange, may_exchange=False)

    assert exchange.owners == []


def test_a_group_that_shares_memory_exchanges_through_it(make, monkeypatch):
    monkeypatch.setattr(groups_module, "_can_share_memory", lambda group: True)
    monkeypatch.setattr(groups_module, "PeerExchange", lambda *args: args)
    monkeypatch.setattr(KVPPGroup, "_make_signals", lambda group, eager_seconds: f"signals {eager_seconds > 0}")
    exchange = FakeExchange()
    group, _ = make(1, exchange=exchange, may_share_memory=True)

    assert group.make_exchange(["area 0", "area 1"]) == (1, ["area 0", "area 1"], "signals True")
    assert exchange.owners == []


def test_only_a_group_that_shares_memory_reads_in_place(make, monkeypatch):
    monkeypatch.setattr(groups_module, "_can_share_memory", lambda group: group.rank == 1)
    monkeypatch.setattr(groups_module, "OwnerReads", lambda signals: ("reads", signals))
    monkeypatch.setattr(KVPPGroup, "_make_signals", lambda group, eager_seconds: f"signals {eager_seconds > 0}")

    assert make(1, may_share_memory=True)[0].make_reads() == ("reads", "signals True")
    with pytest.raises(AssertionError, match="cannot read each other's memory"):
        make(0, may_share_memory=True)[0].make_reads()


def test_a_group_that_shares_no_memory_exchanges_by_collectives_through_its_own(make):
    exchange = FakeExchange()
    group, _ = make(1, exchange=exchange)
    group.make_exchange(["own area"])

    assert exchange.made_from == (group.queries, "own area")


def test_a_device_with_streams_gets_broadcasts_on_a_stream_of_its_own(make, monkeypatch):
    made = []
    monkeypatch.setattr(groups_module, "make_stream_broadcast", lambda *args: made.append(args))
    group, _ = make()
    device, staging = torch.device("cuda:1"), torch.zeros(8)
    replace(group, device=device).make_broadcast(staging, 4)

    assert made == [(group.data, device, staging, 4)]


def test_memory_that_cannot_be_shared_is_named_by_rank_with_a_remedy(make):
    group, world = make(2, pp=2)
    world.answers = [groups_module._Failure("OSError: [Errno 24] Too many open files"), SimpleNamespace()]

    with pytest.raises(KVPPRankMismatchError) as caught:
        group.share(torch.zeros(8, dtype=torch.uint8))
    assert str(caught.value) == (
        "The KVPP group of ranks [2, 3] cannot share memory between its processes: rank 2: OSError: [Errno 24] Too "
        'many open files. Set kvpp.transport to "broadcast".'
    )


def test_a_group_cannot_be_changed():
    group = KVPPGroup(
        ranks=(0, 1),
        rank=0,
        device=CPU,
        timeout_seconds=1.0,
        data=None,
        queries=None,
        control=None,
        shares_memory=False,
    )

    with pytest.raises(AttributeError):
        group.rank = 1
