"""What readers of an owner's memory wait for; each rank is called in turn, in one thread."""

import time

import pytest

from vllm_kvpp.transport.owner_reads import OwnerReads
from vllm_kvpp.transport.signals import make_message


class Ranks:
    """Three ranks with real pipes between them."""

    def __init__(self, signals):
        self.signals = signals
        self.reads = [OwnerReads(rank_signals) for rank_signals in signals]

    def prepare(self, *num_rows):
        for reads, count in zip(self.reads, num_rows, strict=True):
            reads.prepare(count)


@pytest.fixture
def make_ranks(make_signals):
    def make_ranks(timeout_seconds=0.1):
        return Ranks(make_signals(timeout_seconds))

    return make_ranks


def test_a_reader_waits_until_the_owner_has_written(make_ranks):
    ranks = make_ranks()
    ranks.prepare(2, 2, 2)

    with pytest.raises(TimeoutError, match=r"^nothing from group rank 1 within 0\.1 s$"):
        ranks.reads[0].await_written(1, 0)
    ranks.reads[1].tell_written(0)
    ranks.reads[0].await_written(1, 0)
    ranks.reads[2].await_written(1, 0)


def test_what_another_rank_has_written_is_not_taken_for_what_the_owner_has(make_ranks):
    ranks = make_ranks()
    ranks.prepare(2, 2, 2)
    ranks.reads[2].tell_written(0)

    with pytest.raises(TimeoutError, match="group rank 1"):
        ranks.reads[0].await_written(1, 0)


@pytest.mark.parametrize(("rows_of_reader", "number"), [(3, 0), (2, 1)], ids=["rows", "place"])
def test_a_reader_of_something_else_is_told(make_ranks, rows_of_reader, number):
    ranks = make_ranks()
    ranks.prepare(rows_of_reader, 2, 2)
    ranks.reads[1].tell_written(0)

    with pytest.raises(RuntimeError, match=r"^group rank 1 does not move the same in this step"):
        ranks.reads[0].await_written(1, number)


def test_before_it_has_read_in_place_a_rank_waits_for_nobody(make_ranks):
    make_ranks().reads[0].begin_step()


def test_the_next_step_waits_until_every_peer_has_read(make_ranks):
    ranks = make_ranks()
    for rank in (0, 1):
        ranks.reads[rank].tell_read()

    with pytest.raises(TimeoutError, match=r"^nothing from group rank 2 within"):
        ranks.reads[0].begin_step()


def test_who_has_not_read_is_waited_for_again_by_the_step_after(make_ranks):
    ranks = make_ranks()
    for rank in (0, 1):
        ranks.reads[rank].tell_read()
    with pytest.raises(TimeoutError):
        ranks.reads[0].begin_step()
    with pytest.raises(TimeoutError, match=r"^nothing from group rank 2 within"):
        ranks.reads[0].begin_step()
    ranks.reads[2].tell_read()
    ranks.reads[0].begin_step()


def test_what_an_owner_has_written_in_the_next_step_is_not_taken_for_this_ones(make_ranks):
    ranks = make_ranks()
    # Rank 1 has failed before it read in place, and goes on.
    for rank in (0, 1, 1):
        ranks.reads[rank].begin_step()
        ranks.reads[rank].prepare(2)
    ranks.reads[1].tell_written(0)

    with pytest.raises(RuntimeError, match=r"^group rank 1 does not move the same in this step"):
        ranks.reads[0].await_written(1, 0)


def test_a_step_that_all_have_read_is_waited_for_once(make_ranks):
    ranks = make_ranks()
    for reads in ranks.reads:
        reads.tell_read()
    for reads in ranks.reads * 2:
        reads.begin_step()


def test_many_steps_keep_their_messages_apart(make_ranks):
    ranks = make_ranks()
    for num_rows in (3, 3, 1):
        for reads in ranks.reads:
            reads.begin_step()
        ranks.prepare(*[num_rows] * 3)
        for number, owner_rank in enumerate((0, 1, 2, 0)):
            ranks.reads[owner_rank].tell_written(number)
        for number, owner_rank in enumerate((0, 1, 2, 0)):
            for reader, reads in enumerate(ranks.reads):
                if reader != owner_rank:
                    reads.await_written(owner_rank, number)
        for reads in ranks.reads:
            reads.tell_read()


def test_an_owner_that_is_gone_is_noticed_at_once(make_ranks):
    ranks = make_ranks(timeout_seconds=60.0)
    ranks.prepare(2, 2, 2)
    ranks.signals[1].close()
    started = time.monotonic()

    with pytest.raises(RuntimeError, match=r"^group rank 1 is gone$"):
        ranks.reads[0].await_written(1, 0)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("call", ["tell_written", "tell_read"])
def test_a_peer_that_is_gone_is_noticed_by_who_tells_it_and_the_others_are_told_all_the_same(make_ranks, call):
    ranks = make_ranks()
    ranks.prepare(2, 2, 2)
    ranks.signals[1].close()
    with pytest.raises(RuntimeError, match=r"^group rank 1 is gone$"):
        getattr(ranks.reads[0], call)(*([0] if call == "tell_written" else []))

    expected = make_message("in place 0 2", 0) if call == "tell_written" else make_message("have read", 0)
    ranks.signals[2].expect(expected, peers=(0,))


def test_an_owner_that_has_failed_in_the_step_is_said_to_have_given_up(make_ranks):
    ranks = make_ranks(timeout_seconds=60.0)
    ranks.prepare(2, 2, 2)
    ranks.reads[1].tell_read()

    with pytest.raises(RuntimeError, match=r"^group rank 1 has given up this step$"):
        ranks.reads[0].await_written(1, 0)


def test_a_reader_that_is_gone_is_noticed_by_the_next_step(make_ranks):
    ranks = make_ranks(timeout_seconds=60.0)
    for rank in (0, 2):
        ranks.reads[rank].tell_read()
    ranks.signals[1].close()

    with pytest.raises(RuntimeError, match=r"^group rank 1 is gone$"):
        ranks.reads[0].begin_step()
