import pytest
import torch

from vllm_kvpp.errors import KVPPSeamError
from vllm_kvpp.vllm_seam.owner_view import OwnerView

PAGE = 64
NUM_BLOCKS = 4


def make_pages(start):
    """The pages of a cache inside an allocation, every byte another one."""
    allocation = ((torch.arange(3 * NUM_BLOCKS * PAGE) + start) % 251).to(torch.uint8)
    return allocation[NUM_BLOCKS * PAGE : 2 * NUM_BLOCKS * PAGE]


@pytest.fixture
def pages():
    """A rank's own pages and the owner's."""
    return make_pages(0), make_pages(100)


FORMS = {
    "bytes": lambda pages: pages.view(NUM_BLOCKS, PAGE),
    "bfloat16": lambda pages: pages.view(torch.bfloat16).view(NUM_BLOCKS, 4, 8),
    "split_blocks": lambda pages: pages.view(torch.float32).view(2 * NUM_BLOCKS, 2, 4),
    # As of pages that are padded behind their tokens.
    "padded": lambda pages: pages.view(NUM_BLOCKS, PAGE)[:, :48].unflatten(1, (4, 12)),
    "part": lambda pages: pages.view(NUM_BLOCKS, PAGE)[1:, 16:],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_view_of_a_ranks_pages_is_the_same_view_of_the_owners(pages, form):
    own, owners = pages
    seen = OwnerView(own, owners)(form(own))

    assert seen.untyped_storage().data_ptr() == owners.untyped_storage().data_ptr()
    assert (seen.shape, seen.stride(), seen.dtype) == (form(own).shape, form(own).stride(), form(own).dtype)
    assert torch.equal(seen.view(torch.uint8), form(owners).view(torch.uint8))


def test_what_the_owner_writes_later_is_seen(pages):
    own, owners = pages
    seen = OwnerView(own, owners)(FORMS["bytes"](own))
    owners.fill_(7)

    assert torch.equal(seen, torch.full((NUM_BLOCKS, PAGE), 7, dtype=torch.uint8))


def test_an_equal_view_is_answered_with_the_same_tensor(pages):
    own, owners = pages
    view = OwnerView(own, owners)

    assert view(FORMS["bfloat16"](own)) is view(FORMS["bfloat16"](own))


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_another_view_is_answered_anew(pages, first, second):
    own, owners = pages
    view = OwnerView(own, owners)
    view(FORMS[first](own))

    assert torch.equal(view(FORMS[second](own)).view(torch.uint8), FORMS[second](owners).view(torch.uint8))


@pytest.mark.parametrize("shift", [-PAGE, PAGE, 2 * NUM_BLOCKS * PAGE])
def test_a_cache_that_reaches_out_of_the_ranks_pages_is_refused(shift):
    allocation = torch.zeros(4 * NUM_BLOCKS * PAGE, dtype=torch.uint8)
    start = NUM_BLOCKS * PAGE
    own, cache = (allocation[first : first + NUM_BLOCKS * PAGE] for first in (start, start + shift))

    with pytest.raises(KVPPSeamError, match=r"^Decode attends to bytes \[-?\d+, \d+\) of a cache of 256 bytes; KVPP"):
        OwnerView(own, torch.zeros_like(own))(cache)
