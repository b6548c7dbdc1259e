"""A cache of this rank, as it lies in the owner's memory."""

import torch

from vllm_kvpp.errors import KVPPSeamError


class OwnerView:
    """What a rank's own view of a cache is in the owner's memory.

    `own_pages` and `owner_pages` are the cache's pages of both ranks, of equal size.
    """

    def __init__(self, own_pages: torch.Tensor, owner_pages: torch.Tensor) -> None:
        assert own_pages.shape == owner_pages.shape, "the ranks hold different pages"
        self._own_pages = own_pages
        self._owner_pages = owner_pages
        self._asked: torch.Tensor | None = None
        self._answer = owner_pages

    def __call__(self, cache: torch.Tensor) -> torch.Tensor:
        """The same bytes of the owner's pages that `cache` is of this rank's, in its form.

        Raises:
            KVPPSeamError: `cache` is not a view of this rank's pages.
        """
        asked = self._asked
        # Of every step and layer the same, but for the object.
        if asked is None or not _is_same_view(asked, cache):
            self._answer = self._view(cache)
            self._asked = cache
        return self._answer

    def _view(self, cache: torch.Tensor) -> torch.Tensor:
        offset = cache.data_ptr() - self._own_pages.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
        end = offset + (last + 1) * cache.element_size()
        if not 0 <= offset < end <= self._own_pages.numel():
            raise KVPPSeamError(
                f"Decode attends to bytes [{offset}, {end}) of a cache of {self._own_pages.numel()} bytes; KVPP cannot "
                "say where they are at the owner."
            )
        same = self._owner_pages[offset:end].view(cache.dtype)
        return same.as_strided(cache.shape, cache.stride())


def _is_same_view(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.data_ptr() == second.data_ptr()
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
    )
