"""Memory that the ranks of one host read from each other, without a file that could be left behind.

A rank puts shared memory in place of the pages of a tensor, at the same addresses. The memory has never had a name: it
lives as long as a process has it open or mapped. Peers open it through the rank's entry in `/proc`, and map it for
reading.
"""

import ctypes
import mmap
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

PAGE_BYTES = mmap.PAGESIZE
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class SharedHandle:
    """Where a peer finds a rank's shared tensor: `host` says whose numbers `pid` and `fd` are.

    The tensor begins `start` bytes into the file.
    """

    host: str
    pid: int
    fd: int
    start: int
    num_bytes: int


def allocate_pages(num_bytes: int) -> torch.Tensor:
    """Allocate `[num_bytes]` uint8 host memory, zero, on pages of its own."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def describe_host() -> str:
    """The running kernel and the process namespace: where two ranks say the same, process ids mean the same."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"


def share(tensor: torch.Tensor) -> SharedHandle:
    """Make the storage under a host tensor shared, in place: every view of it stays valid, and is zero.

    A page that the storage fills only in part, its first or its last, cannot be shared: it stays as it is. Close the
    handle's `fd` when the peers have mapped it. Not for memory of a heap, whose pages others get when it is freed: a KV
    cache lives as long as its process, and `allocate_pages` takes pages of its own.

    Raises:
        OSError: the system has no such memory to give.
    """
    storage = tensor.untyped_storage()
    start = storage.data_ptr() % PAGE_BYTES
    first_page = storage.data_ptr() - start
    num_bytes = storage.nbytes()
    # As if the file held the pages before and behind too, so that addresses and places in it differ by a constant.
    num_pages = -(-(start + num_bytes) // PAGE_BYTES)
    whole = range(1 if start else 0, (start + num_bytes) // PAGE_BYTES)
    fd = os.memfd_create("kvpp", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_pages * PAGE_BYTES)
        if whole:
            _map_over(first_page + whole.start * PAGE_BYTES, len(whole) * PAGE_BYTES, fd, whole.start * PAGE_BYTES)
    except OSError:
        os.close(fd)
        raise
    return SharedHandle(describe_host(), os.getpid(), fd, start, num_bytes)


def _map_over(address: int, num_bytes: int, fd: int, offset: int) -> None:
    """Put a file's pages in place of those at `address`; Python's own `mmap` takes no address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t),
    )
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = libc.mmap(address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    if mapped == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def open_shared(handle: SharedHandle) -> torch.Tensor:
    """Map a peer's shared tensor for reading, as `[num_bytes]` uint8; see `share` for its first and last page.

    The memory outlives the peer. Writing to the tensor ends this process.

    Raises:
        OSError: the peer is gone, on another host, or may not be read by this user.
    """
    if handle.host != describe_host():
        raise OSError("the peer is on another host, or in another process namespace")
    fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY)
    try:
        mapping = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        # That nobody can write to it is what is wanted.
        warnings.simplefilter("ignore", UserWarning)
        file = torch.frombuffer(mapping, dtype=torch.uint8)
    return file[handle.start : handle.start + handle.num_bytes]
