import gc
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_kvpp.transport.shared_memory import free_shared_bytes, open_shared, share

NUM_BYTES = 3 * 4096 + 5


@pytest.fixture
def shared():
    tensor = torch.arange(NUM_BYTES).to(torch.uint8)
    return tensor, share(tensor)


def test_a_peer_sees_what_was_written_before_and_after_the_memory_was_shared(shared):
    tensor, handle = shared
    view = open_shared(handle)
    assert torch.equal(view, tensor)
    tensor[4097] = 77

    assert view[4097] == 77
    assert view.shape == (NUM_BYTES,)


def test_every_view_of_the_tensor_stays_valid():
    backing = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    cache = backing[512 : 512 + 64].view(torch.float32).view(4, 4)
    view = open_shared(share(backing))
    cache[1, 2] = 2.5

    assert view[512 : 512 + 64].clone().view(torch.float32)[6] == 2.5
    assert cache.untyped_storage().data_ptr() == backing.untyped_storage().data_ptr()


def test_no_file_is_left_in_shared_memory_even_while_it_is_used():
    before = set(os.listdir("/dev/shm"))
    tensor = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    view = open_shared(share(tensor))

    assert set(os.listdir("/dev/shm")) - before == set()
    assert not view.any()


def test_the_memory_outlives_its_owner():
    tensor = torch.full((NUM_BYTES,), 9, dtype=torch.uint8)
    view = open_shared(share(tensor))
    del tensor
    gc.collect()

    assert torch.equal(view, torch.full((NUM_BYTES,), 9, dtype=torch.uint8))


def test_a_peer_cannot_write(shared):
    view = open_shared(shared[1])
    (protection,) = {
        line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if _holds(line, view.data_ptr())
    }

    assert protection == "r--s"


def _holds(line, address):
    first, last = (int(end, 16) for end in line.split()[0].split("-"))
    return first <= address < last


def test_a_peer_on_another_host_is_not_mistaken_for_a_process_of_this_one(shared):
    with pytest.raises(OSError, match="another host"):
        open_shared(replace(shared[1], host="elsewhere"))


def test_a_peer_that_is_gone_cannot_be_read(shared):
    with pytest.raises(OSError, match="No such file"):
        open_shared(replace(shared[1], fd=10**6))


@pytest.fixture
def small_files():
    """No file of this process may be larger than a page, as if the host were out of shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_memory_that_the_host_cannot_share_is_refused_and_stays_what_it_was():
    tensor = torch.full((NUM_BYTES,), 9, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="unable to"):
        share(tensor)
    assert torch.equal(tensor, torch.full((NUM_BYTES,), 9, dtype=torch.uint8))


def test_the_host_says_how_much_can_be_shared():
    assert free_shared_bytes() > NUM_BYTES
