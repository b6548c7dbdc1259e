from contextlib import contextmanager

import pytest
import torch

from vllm_kvpp.selection import BlockRuns, Selection, Way
from vllm_kvpp.transport.stream_broadcast import AcceleratorStreams, StreamBroadcast, make_stream_broadcast

GROUP = object()
SCATTERED = BlockRuns.of([1, 2, 5, 7])
EVENTS = ("ready", "begun", "done", "reached")


class FakeStream:
    """A stream that writes down what it is ordered after. It has no `synchronize`."""

    def __init__(self, name, log):
        self.name = name
        self._log = log

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    """An event that writes down where it is recorded, `time` milliseconds in. It has no `synchronize`."""

    def __init__(self, name, log):
        self.name = name
        self.is_done = False
        self.time = 0.0
        self._log = log

    def record(self, stream):
        self._log.append(f"{self.name} recorded on {stream.name}")

    def query(self):
        return self.is_done

    def elapsed_time(self, other):
        return other.time - self.time


class FakeStreams:
    """`DeviceStreams` with a compute stream as the current one; events are named in the order of their making."""

    def __init__(self):
        self.log = []
        self.events = {}
        self.compute = FakeStream("compute", self.log)
        self.transfer = FakeStream("transfer", self.log)
        self._current = self.compute

    def current(self):
        return self._current

    @contextmanager
    def use(self, stream):
        outer, self._current = self._current, stream
        yield
        self._current = outer

    def event(self):
        name = EVENTS[len(self.events) % len(EVENTS)]
        self.events[name] = FakeEvent(name, self.log)
        return self.events[name]

    def index(self, block_ids):
        self.log.append(f"index of {len(block_ids)} on {self._current.name}")
        return torch.tensor(block_ids)


class FakeWork:
    def __init__(self, log):
        self._log = log

    def wait(self):
        self._log.append("wait for the collective")


@pytest.fixture
def streams(monkeypatch):
    """Fake streams, on which every operation of a transfer writes down where it is queued; `rank` is the group rank."""
    streams = FakeStreams()
    streams.rank, streams.sent, streams.incoming = 0, [], []

    def broadcast(tensor, group=None, async_op=False, group_src=None):
        assert group is GROUP
        assert async_op
        if streams.incoming:
            tensor.copy_(streams.incoming.pop(0))
        streams.sent.append((group_src, tensor.clone()))
        streams.log.append(f"broadcast on {streams.current().name}")
        return FakeWork(streams.log)

    gather, scatter = torch.index_select, torch.Tensor.index_copy_

    def note(what, operation):
        def noted(*args, **kwargs):
            streams.log.append(f"{what} on {streams.current().name}")
            return operation(*args, **kwargs)

        return noted

    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: streams.rank)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    monkeypatch.setattr(torch, "index_select", note("gather", gather))
    monkeypatch.setattr(torch.Tensor, "index_copy_", note("scatter", scatter))
    return streams


def make_transport(streams, staging_bytes=0, page_bytes=8):
    staging = torch.zeros(staging_bytes, dtype=torch.uint8) if staging_bytes else None
    return StreamBroadcast(GROUP, streams, streams.transfer, staging, largest_page_bytes=page_bytes)


def start(streams, memory, way=Way.WHOLE, staging_bytes=0):
    transport = make_transport(streams, staging_bytes, memory.page_size_bytes)
    transport.prepare(Selection(way, SCATTERED))
    return transport.start(memory)


def test_a_transfer_is_ordered_after_the_compute_stream_and_the_collective(streams, make_memory):
    start(streams, make_memory())

    assert streams.log == [
        "ready recorded on compute",
        "transfer waits for ready",
        "begun recorded on transfer",
        "broadcast on transfer",
        "wait for the collective",
        "done recorded on transfer",
    ]


def test_an_owner_gathers_on_the_transfer_stream_chunk_by_chunk(streams, make_memory):
    start(streams, make_memory(), Way.STAGED, staging_bytes=16)

    assert streams.log == [
        "index of 2 on transfer",
        "index of 2 on transfer",
        "ready recorded on compute",
        "transfer waits for ready",
        "begun recorded on transfer",
        *2 * ["gather on transfer", "gather on transfer", "broadcast on transfer", "wait for the collective"],
        "done recorded on transfer",
    ]


def test_a_receiver_scatters_on_the_transfer_stream_behind_the_collective(streams, make_memory):
    streams.rank = 1
    start(streams, make_memory(is_owner=False), Way.STAGED, staging_bytes=32)

    assert streams.log[-5:] == [
        "broadcast on transfer",
        "wait for the collective",
        "scatter on transfer",
        "scatter on transfer",
        "done recorded on transfer",
    ]


@pytest.mark.parametrize("pages", [(6, 2), (5, 3), (16, 8), (12, 4)])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3, 4])
def test_staged_blocks_arrive_at_the_same_ids(streams, make_memory, pages, blocks_per_chunk):
    owners, receivers = make_memory(pages=pages), make_memory(is_owner=False, pages=pages)
    sending = start(streams, owners, Way.STAGED, staging_bytes=blocks_per_chunk * sum(pages))
    streams.rank = 1
    streams.incoming = [chunk for _, chunk in streams.sent]
    receiving = start(streams, receivers, Way.STAGED, staging_bytes=blocks_per_chunk * sum(pages))

    for received, kept in zip(receivers.components, owners.components, strict=True):
        expected = torch.zeros_like(kept)
        expected[list(SCATTERED)] = kept[list(SCATTERED)]
        assert torch.equal(received, expected)
    assert sending.num_bytes == receiving.num_bytes == 4 * sum(pages)


def test_runs_are_sent_one_by_one_from_the_owner(streams, make_memory):
    memory = make_memory(owner_rank=3)
    pending = start(streams, memory, Way.RUNS)

    assert [owner for owner, _ in streams.sent] == [3] * 6
    assert torch.equal(streams.sent[0][1], memory.components[0][1:3].flatten())
    assert (pending.num_bytes, pending.num_calls) == (4 * 8, 6)


def test_indices_are_made_once_a_step(streams, make_memory):
    transport = make_transport(streams, staging_bytes=64)
    for _ in range(2):
        transport.prepare(Selection(Way.STAGED, SCATTERED))
        transport.start(make_memory())
        transport.start(make_memory())

    # The second step reads the same blocks.
    assert [line for line in streams.log if line.startswith("index")] == ["index of 4 on transfer"]


def test_waiting_orders_the_current_stream_and_nothing_else(streams, make_memory):
    pending = start(streams, make_memory())
    streams.log.clear()
    pending.wait()

    assert streams.log == ["reached recorded on compute", "compute waits for done"]


def test_waiting_orders_the_stream_that_is_current_then(streams, make_memory):
    pending = start(streams, make_memory())
    streams.log.clear()
    with streams.use(FakeStream("another", streams.log)):
        pending.wait()

    assert streams.log == ["reached recorded on another", "another waits for done"]


def test_the_compute_stream_is_current_again_after_the_start(streams, make_memory):
    start(streams, make_memory(), Way.STAGED, staging_bytes=64)

    assert streams.current() is streams.compute


@pytest.mark.parametrize(("reached_at", "waited"), [(3.0, 0.004), (9.0, 0.0)], ids=["exposed", "hidden"])
def test_times_are_read_from_events_once_the_device_has_passed_them(streams, make_memory, reached_at, waited):
    pending = start(streams, make_memory())
    assert pending.seconds() is None
    pending.wait()
    events = streams.events
    events["begun"].time, events["done"].time, events["reached"].time = 1.0, 7.0, reached_at
    events["done"].is_done = True
    assert pending.seconds() is None
    events["reached"].is_done = True

    assert pending.seconds().total == pytest.approx(0.006)
    assert pending.seconds().waited == pytest.approx(waited)


def test_a_device_gets_a_transfer_stream_of_its_own(monkeypatch):
    made = []
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch, "Stream", lambda device: made.append(device) or FakeStream("own", []))

    assert isinstance(make_stream_broadcast(GROUP, torch.device("cuda:1")), StreamBroadcast)
    assert made == [torch.device("cuda:1")]


def test_the_current_stream_is_asked_of_the_device_that_holds_the_cache(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current of {device}")

    assert AcceleratorStreams(torch.device("cuda:1")).current() == "current of cuda:1"


def test_an_event_belongs_to_the_device_that_holds_the_cache_and_notes_its_time(monkeypatch):
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing: f"event of {device}, timing {enable_timing}")

    assert AcceleratorStreams(torch.device("cuda:1")).event() == "event of cuda:1, timing True"
