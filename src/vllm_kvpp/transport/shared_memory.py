"""Memory that the ranks of one host read from each other, without a file that could be left behind.

A rank moves a tensor's storage into shared memory, which has no name from then on: it lives as long as a process has it
open or mapped. The others open it through the rank's entry in `/proc`, and map it for reading.
"""

import mmap
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

SHARED_MEMORY_DIR = Path("/dev/shm")


@dataclass(frozen=True)
class SharedHandle:
    """Where a peer finds a rank's shared tensor: `host` says whose numbers `pid` and `fd` are."""

    host: str
    pid: int
    fd: int
    num_bytes: int


def describe_host() -> str:
    """The running kernel and the process namespace: where two ranks say the same, process ids mean the same."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"


def free_shared_bytes() -> int:
    """Bytes that can still be moved into shared memory on this host."""
    return shutil.disk_usage(SHARED_MEMORY_DIR).free


def share(tensor: torch.Tensor) -> SharedHandle:
    """Move the storage under a host tensor into shared memory, in place: every view of it stays valid.

    Raises:
        RuntimeError: there is not enough shared memory.
    """
    storage = tensor.untyped_storage()
    # What `share_memory_` calls with the strategy that leaves no file; it also returns the descriptor.
    fd, num_bytes = storage._share_fd_cpu_()
    return SharedHandle(describe_host(), os.getpid(), fd, num_bytes)


def open_shared(handle: SharedHandle) -> torch.Tensor:
    """Map a peer's shared tensor for reading, as `[num_bytes]` uint8.

    The memory outlives the peer. Writing to the tensor ends this process.

    Raises:
        OSError: the peer is gone, on another host, or may not be read by this user.
    """
    if handle.host != describe_host():
        raise OSError("the peer is on another host, or in another process namespace")
    fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY)
    try:
        mapping = mmap.mmap(fd, handle.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        # That nobody can write to it is what is wanted.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapping, dtype=torch.uint8)
