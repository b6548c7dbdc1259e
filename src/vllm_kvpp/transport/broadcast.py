"""Whole bundles by `torch.distributed.broadcast`, on a stream of its own where the device has streams."""

import time
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from vllm_kvpp.transport.base import BundleMemory, PendingTransfer


class DeviceStreams(Protocol):
    """The stream calls that ordering needs, so that a test can record them."""

    def current(self) -> torch.Stream:
        """The stream on which the caller's work is queued."""

    def use(self, stream: torch.Stream) -> torch.Stream:
        """A context manager that makes `stream` the current one."""

    def event(self) -> torch.Event:
        """A new event."""


class AcceleratorStreams:
    """`DeviceStreams` through torch's device-agnostic calls: CUDA, ROCm, XPU, and out-of-tree devices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> torch.Stream:
        """The current stream of the device."""
        return torch.accelerator.current_stream(self._device)

    def use(self, stream: torch.Stream) -> torch.Stream:
        """A `torch.Stream` is its own context manager."""
        return stream

    def event(self) -> torch.Event:
        """An event without timing."""
        return torch.Event(self._device)


class HostTransfer:
    """A transfer run by the backend's own threads (gloo); waiting blocks the host, for at most the limit."""

    def __init__(self, work: dist.Work, num_bytes: int, timeout_seconds: float) -> None:
        self._work = work
        self.num_bytes = num_bytes
        self._timeout_seconds = timeout_seconds

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        started = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            # gloo reports a lost peer and a time-out by the same type.
            if time.monotonic() - started >= self._timeout_seconds:
                raise TimeoutError(f"not finished after {self._timeout_seconds:g} s") from error
            raise


class StreamTransfer:
    """A transfer queued on the transfer stream; waiting orders the current stream and never blocks the host."""

    def __init__(self, done: torch.Event, num_bytes: int, streams: DeviceStreams) -> None:
        self._done = done
        self.num_bytes = num_bytes
        self._streams = streams

    def wait(self) -> None:
        """See `PendingTransfer.wait`."""
        self._streams.current().wait_event(self._done)


class HostBroadcast:
    """Broadcasts for devices without streams (CPU)."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._group = group
        self._timeout_seconds = timeout_seconds

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        work = _broadcast(memory, self._group)
        return HostTransfer(work, memory.whole.numel(), self._timeout_seconds)


class StreamBroadcast:
    """Broadcasts for devices with streams, ordered by events (R-RUN-4).

    A collective that never finishes is ended by the process group's own limit, which the caller sets when it makes
    the group: the host does not wait here, so nothing here could notice.
    """

    def __init__(self, group: dist.ProcessGroup, streams: DeviceStreams, transfer_stream: torch.Stream) -> None:
        self._group = group
        self._streams = streams
        self._transfer_stream = transfer_stream

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """See `Transport.start`."""
        # Recorded on the compute stream: behind it lie the last write of the source and the last read of the scratch
        # buffer, so the transfer cannot overtake either.
        ready = self._streams.event()
        ready.record(self._streams.current())
        with self._streams.use(self._transfer_stream):
            self._transfer_stream.wait_event(ready)
            work = _broadcast(memory, self._group)
            # Orders the transfer stream after the collective, which runs on a stream of the backend's own.
            work.wait()
            done = self._streams.event()
            # Recorded after the collective on every rank, so the owner too waits until its bytes have been read.
            done.record(self._transfer_stream)
        return StreamTransfer(done, memory.whole.numel(), self._streams)


def _broadcast(memory: BundleMemory, group: dist.ProcessGroup) -> dist.Work:
    # group_src, not src: an owner rank counts inside the KVPP group, `src` in the world; they differ once dp or pp > 1.
    work = dist.broadcast(memory.whole, group_src=memory.owner_rank, group=group, async_op=True)
    assert work is not None, "this process is not in the KVPP group"
    return work


def make_broadcast(
    group: dist.ProcessGroup, device: torch.device, timeout_seconds: float
) -> HostBroadcast | StreamBroadcast:
    """Choose by device: the host path for CPU, streams and events for everything else."""
    if device.type == "cpu":
        return HostBroadcast(group, timeout_seconds)
    return StreamBroadcast(group, AcceleratorStreams(device), torch.Stream(device))
