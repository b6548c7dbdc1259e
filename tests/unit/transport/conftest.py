import pytest
import torch

from vllm_kvpp.transport.base import BundleMemory

PAGES = (6, 2)


@pytest.fixture
def make_memory():
    """A bundle of two components with 8 blocks each; at a receiver all zero, at the owner different everywhere."""

    def make_memory(*, owner_rank=0, is_owner=True, pages=PAGES, num_blocks=8):
        whole = torch.zeros(num_blocks * sum(pages), dtype=torch.uint8)
        if is_owner:
            whole.copy_(torch.arange(1, whole.numel() + 1) % 251)
        parts = whole.split([num_blocks * page for page in pages])
        return BundleMemory(owner_rank, whole, tuple(part.view(num_blocks, -1) for part in parts))

    return make_memory
