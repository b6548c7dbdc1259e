import gc
import mmap
import os
import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_kvpp.transport.shared_memory import allocate_pages, open_shared, share

PAGE = mmap.PAGESIZE


def allocate(start, num_bytes):
    """Memory that begins `start` bytes behind a page boundary, on pages of its own, and is a storage of its own."""
    pages = mmap.mmap(-1, start + num_bytes + PAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, offset=start, count=num_bytes)


@pytest.fixture
def shared():
    tensor = allocate_pages(3 * PAGE)
    return tensor, share(tensor)


def test_a_peer_sees_what_is_written_once_the_memory_is_shared(shared):
    tensor, handle = shared
    view = open_shared(handle)
    tensor[PAGE + 1] = 77

    assert view[PAGE + 1] == 77
    assert view.shape == (3 * PAGE,)


@pytest.mark.parametrize("start", [0, 64, PAGE - 1])
@pytest.mark.parametrize("num_bytes", [3 * PAGE, 3 * PAGE + 5, PAGE, 100])
def test_all_pages_are_shared_that_lie_in_the_tensor_as_a_whole(start, num_bytes):
    tensor = allocate(start, num_bytes)
    view = open_shared(share(tensor))
    tensor.copy_(torch.arange(num_bytes) % 251)
    first = -start % PAGE
    end = (start + num_bytes) // PAGE * PAGE - start

    assert view.shape == tensor.shape
    assert torch.equal(view[first:end], tensor[first:end])


def test_every_view_of_the_tensor_stays_valid_at_its_address():
    backing = allocate_pages(3 * PAGE)
    cache = backing[PAGE : PAGE + 64].view(torch.float32).view(4, 4)
    address = cache.data_ptr()
    view = open_shared(share(backing))
    cache[1, 2] = 2.5

    assert cache.data_ptr() == address
    assert view[PAGE : PAGE + 64].clone().view(torch.float32)[6] == 2.5


def test_the_memory_has_no_name_while_it_is_used(shared):
    view = open_shared(shared[1])

    assert _mapping_of(shared[0])[5] == _mapping_of(view)[5] == "/memfd:kvpp (deleted)"


def test_the_memory_outlives_its_owner(shared):
    tensor, handle = shared
    tensor.fill_(9)
    view = open_shared(handle)
    os.close(handle.fd)
    del tensor, shared
    gc.collect()

    assert torch.equal(view, torch.full((3 * PAGE,), 9, dtype=torch.uint8))


def test_a_peer_cannot_write(shared):
    assert _mapping_of(open_shared(shared[1]))[1] == "r--s"


def _mapping_of(tensor):
    """Addresses, permissions, offset, device, inode and path of the mapping that a tensor begins in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in fields[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return fields
    raise AssertionError("not mapped")


def test_a_peer_on_another_host_is_not_mistaken_for_a_process_of_this_one(shared):
    with pytest.raises(OSError, match="another host"):
        open_shared(replace(shared[1], host="elsewhere"))


def test_a_peer_that_is_gone_cannot_be_read(shared):
    with pytest.raises(OSError, match="No such file"):
        open_shared(replace(shared[1], fd=10**6))


@contextmanager
def small_files():
    """No file of this process may be larger than a page; nothing is written meanwhile, a log either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_that_the_system_does_not_give_is_refused_and_the_tensor_stays_what_it_was():
    tensor = allocate_pages(3 * PAGE)
    tensor.fill_(9)
    open_files = len(os.listdir("/proc/self/fd"))

    with pytest.raises(OSError, match="File too large"), small_files():
        share(tensor)
    assert torch.equal(tensor, torch.full((3 * PAGE,), 9, dtype=torch.uint8))
    assert len(os.listdir("/proc/self/fd")) == open_files
