import gc
import threading
import time
import weakref

import pytest
import torch

from vllm_kvpp.transport.transfer_thread import TransferThread


@pytest.fixture
def thread():
    return TransferThread(timeout_seconds=5.0)


def submit(thread, move, **changes):
    return thread.submit(move, **({"num_bytes": 96, "num_calls": 2} | changes))


def test_moves_run_one_behind_the_other_in_the_order_of_their_submission(thread):
    log = []
    moves = [submit(thread, lambda number=number: (time.sleep(0.01), log.append(number))) for number in range(4)]
    for move in moves:
        move.wait()

    assert log == [0, 1, 2, 3]


def test_submitting_does_not_wait(thread):
    go_on = threading.Event()
    pending = submit(thread, go_on.wait)
    assert pending.seconds() is None
    go_on.set()
    pending.wait()


def test_a_transfer_counts_its_bytes_and_calls(thread):
    pending = submit(thread, lambda: None, num_bytes=7, num_calls=3)

    assert (pending.num_bytes, pending.num_calls) == (7, 3)


def test_the_time_behind_the_callers_work_is_not_waited_for(thread):
    pending = submit(thread, lambda: time.sleep(0.2))
    time.sleep(0.15)
    pending.wait()

    assert pending.seconds().total >= 0.2
    assert pending.seconds().waited <= pending.seconds().total - 0.1


def test_times_are_unknown_until_the_caller_has_waited(thread):
    pending = submit(thread, lambda: None)
    submit(thread, lambda: None).wait()

    assert pending.seconds() is None


def test_a_failed_move_fails_at_the_wait_and_the_next_one_runs(thread):
    failure = RuntimeError("Connection closed by peer")

    def fail():
        raise failure

    failed, following = submit(thread, fail), submit(thread, lambda: None)
    with pytest.raises(RuntimeError) as caught:
        failed.wait()
    assert caught.value is failure
    assert failed.seconds() is None
    following.wait()


def test_a_move_that_takes_longer_than_the_limit_times_out():
    thread, go_on = TransferThread(timeout_seconds=0.05), threading.Event()
    pending = submit(thread, go_on.wait)

    with pytest.raises(TimeoutError, match=r"^not finished after 0\.05 s$"):
        pending.wait()
    go_on.set()


def test_an_error_of_the_backend_at_its_limit_is_a_time_out():
    def fail_late():
        time.sleep(0.05)
        raise RuntimeError("Timed out waiting 50ms for recv operation to complete")

    thread = TransferThread(timeout_seconds=0.05)
    pending = submit(thread, fail_late)
    time.sleep(0.2)

    with pytest.raises(TimeoutError, match="not finished after") as caught:
        pending.wait()
    assert "recv operation" in str(caught.value.__cause__)


def test_the_thread_ends_with_its_owner_and_lets_go_of_what_it_moved():
    gc.collect()
    before = set(threading.enumerate())
    thread, moved = TransferThread(timeout_seconds=5.0), torch.zeros(1)
    gone = weakref.ref(moved)
    submit(thread, lambda tensor=moved: tensor.add_(1)).wait()
    del moved, thread
    gc.collect()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)

    assert set(threading.enumerate()) - before == set()
    assert gone() is None


def test_a_move_shows_in_a_trace_of_all_threads(thread):
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=everywhere) as profile:
        submit(thread, lambda: torch.zeros(8).add_(1)).wait()

    assert "kvpp.transfer" in {event.name for event in profile.events()}
