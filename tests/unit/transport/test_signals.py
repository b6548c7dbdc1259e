import gc
import os
import threading
import time

import pytest

from vllm_kvpp.transport.signals import MESSAGE_BYTES, Inbox, PipeHandle, Signals, make_message, open_writer


def connect(size, timeout_seconds=5.0):
    """The signals of all ranks of a group, in one process, and a way to end one."""
    inboxes = [Inbox(tuple(peer for peer in range(size) if peer != rank)) for rank in range(size)]
    writers = [
        {peer: open_writer(inboxes[peer].handles[rank]) for peer in range(size) if peer != rank} for rank in range(size)
    ]
    for inbox in inboxes:
        inbox.close_writing()
    return [Signals(*ends, timeout_seconds) for ends in zip(inboxes, writers, strict=True)]


def end(signals):
    """What the system does when a rank ends."""
    signals.close()


def message(number=0):
    return number.to_bytes(MESSAGE_BYTES)


def test_messages_of_one_sender_arrive_in_order():
    first, second = connect(2)
    for number in (1, 2, 3):
        first.send(1, message(number))
    for number in (1, 2, 3):
        second.expect(message(number))


def test_a_rank_waits_for_all_others():
    ranks = connect(3)
    waiter = threading.Thread(target=ranks[0].expect, args=(message(),))
    waiter.start()
    ranks[1].send(0, message())
    waiter.join(0.1)
    assert waiter.is_alive()
    ranks[2].send(0, message())
    waiter.join(5)
    assert not waiter.is_alive()


def test_a_rank_waits_for_those_that_it_names_and_for_no_other():
    ranks = connect(3, timeout_seconds=0.1)
    ranks[2].send(0, message(2))
    ranks[0].expect(message(2), peers=(2,))

    with pytest.raises(TimeoutError, match=r"^nothing from group rank 2 within"):
        ranks[0].expect(message(2), peers=(2,))


def test_messages_of_ranks_that_are_not_waited_for_are_kept():
    ranks = connect(3)
    ranks[1].send(0, message(1))
    ranks[2].send(0, message(2))
    ranks[0].expect(message(2), peers=(2,))
    ranks[0].expect(message(1), peers=(1,))


def test_a_rank_that_has_ended_is_not_missed_by_who_waits_for_another():
    ranks = connect(3)
    end(ranks[1])
    ranks[2].send(0, message())
    ranks[0].expect(message(), peers=(2,))


def test_messages_differ_by_what_a_step_does_and_by_the_place_in_it():
    messages = {make_message(subject, number) for subject in ("runs", "decode 2") for number in range(3)}

    assert len(messages) == 6
    assert {len(found) for found in messages} == {MESSAGE_BYTES}
    assert make_message("runs", 1) in messages


def test_a_message_that_is_not_the_expected_one_names_its_sender():
    ranks = connect(3)
    ranks[1].send(0, message(1))
    ranks[2].send(0, message(2))

    with pytest.raises(
        RuntimeError, match=r"^group rank 2 does not move the same in this step \(0{22}02, not 0{22}01\)$"
    ):
        ranks[0].expect(message(1))


def test_a_rank_that_says_nothing_is_named_at_the_limit():
    ranks = connect(3, timeout_seconds=0.1)
    ranks[1].send(0, message())
    started = time.monotonic()

    with pytest.raises(TimeoutError, match=r"^nothing from group rank 2 within 0\.1 s$"):
        ranks[0].expect(message())
    assert time.monotonic() - started < 2


def test_a_rank_that_has_ended_is_noticed_at_once_by_who_waits_for_it():
    first, second = connect(2, timeout_seconds=60.0)
    end(second)

    with pytest.raises(RuntimeError, match=r"^group rank 1 is gone$"):
        first.expect(message())


def test_a_rank_that_has_ended_is_noticed_by_who_sends_to_it():
    first, second = connect(2)
    end(second)

    with pytest.raises(RuntimeError, match=r"^group rank 1 is gone$"):
        first.send(1, message())


def test_what_a_rank_sent_before_it_ended_still_arrives():
    first, second = connect(2)
    second.send(0, message())
    end(second)
    first.expect(message())


def test_a_pipe_that_is_not_there_cannot_be_opened():
    with pytest.raises(OSError, match="No such file"):
        open_writer(PipeHandle(os.getpid(), 10**6))


def test_a_rank_that_has_ended_shows_behind_one_that_says_nothing():
    ranks = connect(3, timeout_seconds=60.0)
    end(ranks[2])

    with pytest.raises(RuntimeError, match=r"^group rank 2 is gone$"):
        ranks[0].expect(message())


def test_a_rank_that_has_said_what_was_expected_may_end_while_others_are_waited_for():
    ranks = connect(3)
    ranks[1].send(0, message())
    end(ranks[1])
    waiter = threading.Thread(target=ranks[0].expect, args=(message(),))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    ranks[2].send(0, message())
    waiter.join(5)
    assert not waiter.is_alive()


def test_messages_that_arrive_early_are_kept_for_their_turn():
    ranks = connect(3)
    for number in (1, 2):
        ranks[1].send(0, message(number))
    ranks[2].send(0, message(1))
    ranks[0].expect(message(1))
    ranks[2].send(0, message(2))
    ranks[0].expect(message(2))


def test_a_message_of_another_length_is_a_bug_of_ours():
    with pytest.raises(AssertionError, match="a message of 3 bytes"):
        connect(2)[0].send(1, b"abc")


def test_all_pipes_are_closed_with_the_last_use():
    before = len(os.listdir("/proc/self/fd"))
    signals = connect(3)
    del signals
    gc.collect()

    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("eager_seconds", [0.0, 0.05])
def test_an_eager_wait_ends_at_the_limit_as_any_other(eager_seconds):
    inbox = Inbox((1,))
    signals = Signals(inbox, {}, timeout_seconds=0.1, eager_seconds=eager_seconds)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"nothing from group rank 1 within 0\.1 s"):
        signals.expect(b"x" * MESSAGE_BYTES, peers=(1,))

    assert 0.1 <= time.monotonic() - started < 2
    inbox.close_writing()


def test_an_eager_wait_sees_a_message_and_a_closed_pipe():
    inbox = Inbox((1,))
    signals = Signals(inbox, {}, timeout_seconds=5, eager_seconds=5)
    writer = os.dup(inbox._writing[1])
    inbox.close_writing()
    os.write(writer, b"x" * MESSAGE_BYTES)
    os.close(writer)

    signals.expect(b"x" * MESSAGE_BYTES, peers=(1,))
    with pytest.raises(RuntimeError, match="group rank 1 is gone"):
        signals.expect(b"x" * MESSAGE_BYTES, peers=(1,))
