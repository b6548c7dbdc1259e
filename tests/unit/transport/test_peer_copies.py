from dataclasses import replace

import pytest
import torch

from vllm_kvpp.selection import BlockRuns, Selection, Way
from vllm_kvpp.transport.peer_copies import PeerCopies

SCATTERED = BlockRuns.of([1, 2, 5, 7])


class FakeSignals:
    """Signals that are written down; `failure` is raised in place of the meeting's answers."""

    peers = (1, 2)

    def __init__(self, log, failure=None):
        self.log = log
        self.failure = failure

    def send(self, peer, message):
        self.log.append(("send", peer, message))

    def expect(self, message):
        self.log.append(("expect", message))
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def make_rank(make_memory):
    """Group rank 0 with a bundle that it owns, or receives from rank 1; and the log of its signals."""

    def make_rank(*, is_owner, failure=None):
        log = []
        owners = make_memory()
        memory = replace(owners, owner_rank=0)
        if not is_owner:
            memory = replace(make_memory(is_owner=False), owner_rank=1, source=owners.components)
        return PeerCopies(0, FakeSignals(log, failure), 5.0), memory, log

    return make_rank


def test_all_ranks_meet_before_the_first_copy(make_rank):
    transport, memory, log = make_rank(is_owner=False)
    transport.prepare(Selection(Way.RUNS, SCATTERED))
    transport.start(memory).wait()

    (_, first, greeting), (_, second, _), (what, expected), *_ = log
    assert [first, second, what] == [1, 2, "expect"]
    assert greeting == expected


def test_a_receiver_copies_the_selected_blocks_and_then_tells_the_owner(make_rank):
    transport, memory, log = make_rank(is_owner=False)
    transport.prepare(Selection(Way.RUNS, SCATTERED))
    pending = transport.start(memory)
    pending.wait()

    for received, kept in zip(memory.components, memory.source, strict=True):
        expected = torch.zeros_like(kept)
        expected[list(SCATTERED)] = kept[list(SCATTERED)]
        assert torch.equal(received, expected)
    assert log[-1][:2] == ("send", 1)
    assert (pending.num_bytes, pending.num_calls) == (4 * 8, 6)


def test_a_receiver_copies_all_blocks_of_a_whole_bundle(make_rank):
    transport, memory, _ = make_rank(is_owner=False)
    transport.prepare(Selection(Way.WHOLE, SCATTERED))
    pending = transport.start(memory)
    pending.wait()

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(memory.components, memory.source, strict=True))
    assert (pending.num_bytes, pending.num_calls) == (64, 2)


def test_an_owner_waits_for_all_receivers_and_moves_nothing(make_rank):
    transport, memory, log = make_rank(is_owner=True)
    before = memory.whole.clone()
    transport.prepare(Selection(Way.RUNS, SCATTERED))
    pending = transport.start(memory)
    pending.wait()

    assert [call[0] for call in log] == ["send", "send", "expect", "expect"]
    assert torch.equal(memory.whole, before)
    assert pending.num_bytes == 4 * 8


def test_a_receipt_names_the_step_and_the_transfer(make_rank):
    transport, memory, log = make_rank(is_owner=False)
    receipts = []
    for blocks in (SCATTERED, BlockRuns.of([1])):
        transport.prepare(Selection(Way.RUNS, blocks))
        for _ in range(2):
            transport.start(memory).wait()
            receipts.append(log[-1][2])

    assert len(set(receipts)) == 4


@pytest.mark.parametrize(
    "other", [Selection(Way.RUNS, BlockRuns.of([1, 2, 5])), Selection(Way.WHOLE, SCATTERED)], ids=["blocks", "way"]
)
def test_ranks_that_would_move_something_else_say_something_else(make_rank, other):
    digests = []
    for selection in (Selection(Way.RUNS, SCATTERED), other):
        transport, memory, log = make_rank(is_owner=True)
        transport.prepare(selection)
        transport.start(memory).wait()
        digests.append(log[0][2])

    assert len(set(digests)) == 2


def test_nothing_is_copied_when_the_ranks_do_not_agree(make_rank):
    failure = RuntimeError("group rank 1 does not move the same blocks in this step")
    transport, memory, _ = make_rank(is_owner=False, failure=failure)
    transport.prepare(Selection(Way.RUNS, SCATTERED))

    with pytest.raises(RuntimeError) as caught:
        transport.start(memory).wait()
    assert caught.value is failure
    assert not memory.whole.any()


def test_a_transfer_before_anything_was_prepared_is_a_bug_of_ours(make_rank):
    transport, memory, _ = make_rank(is_owner=True)

    with pytest.raises(AssertionError, match="before anything was prepared"):
        transport.start(memory)
