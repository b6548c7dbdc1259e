import pytest
import torch

from vllm_kvpp.selection import BlockRuns, Selection, Way
from vllm_kvpp.transport.broadcast import HostBroadcast

GROUP = object()
SCATTERED = BlockRuns.of([1, 2, 5, 7])


class FakeWork:
    """A collective under way."""

    def __init__(self, failure=None):
        self.failure = failure

    def wait(self):
        if self.failure is not None:
            raise self.failure


class FakeGroup:
    """Stands in for `torch.distributed` as one rank sees it.

    `calls` holds what is broadcast; at a receiver, `incoming` is what arrives, piece by piece.
    """

    def __init__(self, monkeypatch, rank):
        self.calls = []
        self.incoming = []
        self.failure = None
        self._rank = rank
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
        monkeypatch.setattr(torch.distributed, "broadcast", self._broadcast)

    def _broadcast(self, tensor, src=None, group=None, async_op=False, group_src=None):
        if self.incoming:
            tensor.copy_(self.incoming.pop(0))
        self.calls.append(
            {"bytes": tensor.clone(), "src": src, "group": group, "async_op": async_op, "group_src": group_src}
        )
        return FakeWork(self.failure)


@pytest.fixture
def make_rank(monkeypatch):
    """A transport and what it does on one rank; `staging_bytes` of memory for blocks of 8 bytes."""

    def make_rank(rank, *, staging_bytes=0):
        group = FakeGroup(monkeypatch, rank)
        staging = torch.zeros(staging_bytes, dtype=torch.uint8) if staging_bytes else None
        return HostBroadcast(GROUP, 5.0, staging, largest_page_bytes=8), group

    return make_rank


def send(transport, way, blocks, memory):
    transport.prepare(Selection(way, blocks))
    pending = transport.start(memory)
    pending.wait()
    return pending


def test_the_whole_bundle_is_sent_from_its_owner_inside_the_group(make_rank, make_memory):
    transport, group = make_rank(1)
    memory = make_memory(owner_rank=3)
    pending = send(transport, Way.WHOLE, SCATTERED, memory)
    (call,) = group.calls

    assert torch.equal(call["bytes"], memory.whole)
    assert call["group"] is GROUP
    # An owner rank counts inside the group; `src` counts in the world.
    assert (call["group_src"], call["src"]) == (3, None)
    assert (pending.num_bytes, pending.num_calls) == (64, 1)


def test_runs_are_sent_one_by_one_component_by_component(make_rank, make_memory):
    transport, group = make_rank(0)
    memory = make_memory()
    pending = send(transport, Way.RUNS, SCATTERED, memory)

    sent = [call["bytes"].tolist() for call in group.calls]
    main, indexer = memory.components
    assert sent == [
        main[1:3].flatten().tolist(),
        main[5].tolist(),
        main[7].tolist(),
        indexer[1:3].flatten().tolist(),
        indexer[5].tolist(),
        indexer[7].tolist(),
    ]
    assert (pending.num_bytes, pending.num_calls) == (4 * 8, 6)


@pytest.mark.parametrize(("staging_bytes", "num_chunks"), [(8, 4), (23, 2), (24, 2), (64, 1)])
def test_staged_blocks_arrive_at_the_same_ids_in_as_many_chunks_as_the_memory_makes_them(
    make_rank, make_memory, staging_bytes, num_chunks
):
    owners = make_memory()
    transport, group = make_rank(0, staging_bytes=staging_bytes)
    sending = send(transport, Way.STAGED, SCATTERED, owners)
    chunks = [call["bytes"] for call in group.calls]

    transport, group = make_rank(1, staging_bytes=staging_bytes)
    group.incoming = list(chunks)
    receivers = make_memory(is_owner=False)
    receiving = send(transport, Way.STAGED, SCATTERED, receivers)

    for received, kept in zip(receivers.components, owners.components, strict=True):
        expected = torch.zeros_like(kept)
        expected[list(SCATTERED)] = kept[list(SCATTERED)]
        assert torch.equal(received, expected)
    assert sending.num_bytes == receiving.num_bytes == 4 * 8 == sum(chunk.numel() for chunk in chunks)
    assert sending.num_calls == receiving.num_calls == num_chunks


def test_an_owner_does_not_write_its_own_blocks(make_rank, make_memory):
    transport, _ = make_rank(0, staging_bytes=16)
    memory = make_memory()
    before = memory.whole.clone()
    send(transport, Way.STAGED, SCATTERED, memory)

    assert torch.equal(memory.whole, before)


def test_the_blocks_of_a_step_are_those_that_were_named_last(make_rank, make_memory):
    transport, group = make_rank(0)
    send(transport, Way.RUNS, BlockRuns.of([1]), make_memory())
    group.calls.clear()
    send(transport, Way.RUNS, BlockRuns.of([4]), make_memory())

    assert [call["bytes"].numel() for call in group.calls] == [6, 2]
    assert torch.equal(group.calls[0]["bytes"], make_memory().components[0][4])


def test_a_rank_outside_the_group_is_a_bug_of_ours(make_rank, make_memory, monkeypatch):
    transport, _ = make_rank(0)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, **kwargs: None)

    with pytest.raises(AssertionError, match="not in the KVPP group"):
        transport.start(make_memory()).wait()


def test_a_lost_peer_is_reported_as_the_backend_reports_it(make_rank, make_memory):
    transport, group = make_rank(0)
    group.failure = RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError) as caught:
        transport.start(make_memory()).wait()
    assert caught.value is group.failure


@pytest.mark.parametrize(("staging_bytes", "blocks"), [(0, 0), (7, 0), (8, 1), (63, 7)])
def test_as_many_blocks_are_staged_as_the_memory_holds_of_the_largest_bundle(make_rank, staging_bytes, blocks):
    assert make_rank(0, staging_bytes=staging_bytes)[0].traits.blocks_per_chunk == blocks
