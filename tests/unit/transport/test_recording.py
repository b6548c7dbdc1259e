import pytest
import torch

from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.transport.recording import RecordingTransport


def bundle_memory(num_bytes=8):
    whole = torch.zeros(num_bytes, dtype=torch.uint8)
    return BundleMemory(0, whole, (whole.view(2, -1),))


def test_starts_and_waits_are_written_down_in_the_order_of_the_calls():
    transport = RecordingTransport()
    first, second = bundle_memory(), bundle_memory()
    pending = transport.start(first)
    transport.start(second)
    pending.wait()

    assert [(call, memory is first) for call, memory in transport.log] == [
        ("start", True),
        ("start", False),
        ("wait", True),
    ]


def test_a_failing_transport_fails_at_the_wait_and_not_at_the_start():
    transport = RecordingTransport(failure=TimeoutError("not finished"))
    pending = transport.start(bundle_memory())

    with pytest.raises(TimeoutError, match="not finished"):
        pending.wait()
    assert [call for call, _ in transport.log] == ["start", "wait"]


def test_a_recorded_transfer_counts_the_bytes_of_its_bundle():
    assert RecordingTransport().start(bundle_memory(num_bytes=8)).num_bytes == 8


def test_nothing_is_moved():
    memory = bundle_memory()
    RecordingTransport().start(memory).wait()

    assert not memory.whole.any()
