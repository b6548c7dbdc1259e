import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.transport.broadcast import (
    AcceleratorStreams,
    HostBroadcast,
    HostTransfer,
    StreamBroadcast,
    make_broadcast,
)

GROUP = object()


def bundle_memory(owner_rank=3, num_bytes=96):
    whole = torch.zeros(num_bytes, dtype=torch.uint8)
    return BundleMemory(owner_rank, whole, (whole.view(4, -1),))


class FakeWork:
    """A collective under way; `wait` takes `seconds`, then fails if told to."""

    def __init__(self, log=None, *, seconds=0.0, failure=None):
        self.log = log if log is not None else []
        self.seconds = seconds
        self.failure = failure

    def wait(self, timeout=None):
        self.log.append("wait for the collective" if timeout is None else timeout)
        time.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure


class FakeStream:
    """A stream that writes down what it is ordered after. It has no `synchronize`."""

    def __init__(self, name, log):
        self.name = name
        self._log = log

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    """An event that writes down where it is recorded. It has no `synchronize`."""

    def __init__(self, name, log):
        self.name = name
        self._log = log

    def record(self, stream):
        self._log.append(f"{self.name} recorded on {stream.name}")


class FakeStreams:
    """`DeviceStreams` with a compute stream as the current one; events are named in the order of their making."""

    def __init__(self):
        self.log = []
        self.compute = FakeStream("compute", self.log)
        self.transfer = FakeStream("transfer", self.log)
        self._current = self.compute
        self._names = iter(("ready", "done"))

    def current(self):
        return self._current

    @contextmanager
    def use(self, stream):
        outer, self._current = self._current, stream
        yield
        self._current = outer

    def event(self):
        return FakeEvent(next(self._names), self.log)


@pytest.fixture
def streams(monkeypatch):
    """Fake streams, on which `torch.distributed.broadcast` writes down where it is queued."""
    streams = FakeStreams()

    def broadcast(tensor, **kwargs):
        streams.log.append(f"broadcast on {streams.current().name}")
        return FakeWork(streams.log)

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    return streams


@pytest.fixture
def broadcasts(monkeypatch):
    """The arguments of every `torch.distributed.broadcast`."""
    calls = []

    def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
        calls.append({"tensor": tensor, "src": src, "group": group, "async_op": async_op, "group_src": group_src})
        return FakeWork()

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    return calls


def start_on(streams):
    return StreamBroadcast(GROUP, streams, streams.transfer).start(bundle_memory())


@pytest.mark.parametrize(
    "transport", [HostBroadcast(GROUP, 5.0), StreamBroadcast(GROUP, FakeStreams(), FakeStream("transfer", []))]
)
def test_the_whole_bundle_is_sent_from_its_owner_inside_the_group_without_blocking(transport, broadcasts):
    memory = bundle_memory(owner_rank=3)
    transport.start(memory)
    (call,) = broadcasts

    assert call["tensor"] is memory.whole
    assert call["group"] is GROUP
    assert call["async_op"] is True
    # An owner rank counts inside the group; `src` counts in the world.
    assert call["group_src"] == 3
    assert call["src"] is None


def test_a_rank_outside_the_group_is_a_bug_of_ours(monkeypatch):
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, **kwargs: None)

    with pytest.raises(AssertionError, match="not in the KVPP group"):
        HostBroadcast(GROUP, 5.0).start(bundle_memory())


def test_a_host_transfer_counts_the_bytes_of_its_bundle(broadcasts):
    assert HostBroadcast(GROUP, 5.0).start(bundle_memory(num_bytes=96)).num_bytes == 96


def test_starting_a_host_transfer_does_not_wait_for_it(monkeypatch):
    work = FakeWork()
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, **kwargs: work)
    HostBroadcast(GROUP, 5.0).start(bundle_memory())

    assert work.log == []


def test_a_host_transfer_waits_for_at_most_the_limit(monkeypatch):
    work = FakeWork()
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, **kwargs: work)
    HostBroadcast(GROUP, 2.5).start(bundle_memory()).wait()

    assert work.log == [timedelta(seconds=2.5)]


def test_a_host_transfer_that_takes_longer_than_the_limit_times_out():
    work = FakeWork(seconds=0.02, failure=RuntimeError("Timed out waiting 10ms for recv operation to complete"))

    with pytest.raises(TimeoutError, match=r"^not finished after 0\.01 s$") as caught:
        HostTransfer(work, 96, timeout_seconds=0.01).wait()
    assert caught.value.__cause__ is work.failure


def test_a_lost_peer_of_a_host_transfer_is_reported_as_the_backend_reports_it():
    work = FakeWork(failure=RuntimeError("Connection closed by peer"))

    with pytest.raises(RuntimeError) as caught:
        HostTransfer(work, 96, timeout_seconds=5.0).wait()
    assert caught.value is work.failure


def test_a_stream_transfer_is_ordered_after_the_compute_stream_and_the_collective(streams):
    start_on(streams)

    assert streams.log == [
        "ready recorded on compute",
        "transfer waits for ready",
        "broadcast on transfer",
        "wait for the collective",
        "done recorded on transfer",
    ]


def test_waiting_for_a_stream_transfer_orders_the_current_stream_and_nothing_else(streams):
    pending = start_on(streams)
    streams.log.clear()
    pending.wait()

    assert streams.log == ["compute waits for done"]


def test_waiting_orders_the_stream_that_is_current_then(streams):
    pending = start_on(streams)
    streams.log.clear()
    with streams.use(FakeStream("another", streams.log)):
        pending.wait()

    assert streams.log == ["another waits for done"]


def test_the_compute_stream_is_current_again_after_the_start(streams):
    start_on(streams)

    assert streams.current() is streams.compute


def test_a_stream_transfer_counts_the_bytes_of_its_bundle(streams):
    assert start_on(streams).num_bytes == 96


def test_a_device_without_streams_gets_the_host_path():
    assert isinstance(make_broadcast(GROUP, torch.device("cpu"), 5.0), HostBroadcast)


def test_a_device_with_streams_gets_a_transfer_stream_of_its_own(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "Stream", lambda device: made.append(device) or FakeStream("own", []))
    transport = make_broadcast(GROUP, torch.device("cuda:1"), 5.0)

    assert isinstance(transport, StreamBroadcast)
    assert made == [torch.device("cuda:1")]


def test_the_current_stream_is_asked_of_the_device_that_holds_the_cache(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current of {device}")

    assert AcceleratorStreams(torch.device("cuda:1")).current() == "current of cuda:1"


def test_an_event_belongs_to_the_device_that_holds_the_cache(monkeypatch):
    monkeypatch.setattr(torch, "Event", lambda device: f"event of {device}")

    assert AcceleratorStreams(torch.device("cuda:1")).event() == "event of cuda:1"
