"""The plan of one pipeline stage: bundles, owners, draft caches, and bytes per block (R-OWN, R-MEM-1)."""

import hashlib
from collections.abc import Iterable, Set
from dataclasses import dataclass

from vllm_kvpp.plan.bundles import LayerBundle, LayerCache, bundle_by_layer, split_draft_caches
from vllm_kvpp.plan.owners import assign_owner_ranks

# One buffer for the layer that runs, one for the next layer's prefetch.
NUM_SCRATCH_BUFFERS = 2


@dataclass(frozen=True)
class BytesPerBlock:
    """What one block costs one rank, by kind."""

    owned: int
    draft: int
    scratch: int

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.owned + self.draft + self.scratch


@dataclass(frozen=True)
class CachePlan:
    """Who keeps what, for one pipeline stage; the same value on every rank of its group (R-OWN-4)."""

    group_size: int
    bundles: tuple[LayerBundle, ...]
    owner_ranks: tuple[int, ...]
    draft_caches: tuple[LayerCache, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.bundles) == len(self.owner_ranks)

    @property
    def largest_bundle_page_bytes(self) -> int:
        """Bytes of one block of the largest bundle, which is also what a scratch buffer holds for it (R-LAY-4)."""
        return max((bundle.page_size_bytes for bundle in self.bundles), default=0)

    @property
    def full_bytes_per_block(self) -> int:
        """What one block costs without KVPP: every layer on every rank."""
        return sum(bundle.page_size_bytes for bundle in self.bundles) + self._draft_page_bytes

    @property
    def _draft_page_bytes(self) -> int:
        return sum(cache.page_size_bytes for cache in self.draft_caches)

    def bytes_per_block(self, group_rank: int) -> BytesPerBlock:
        """What one block costs `group_rank` with KVPP."""
        return BytesPerBlock(
            owned=sum(bundle.page_size_bytes for bundle in self.owned_bundles(group_rank)),
            draft=self._draft_page_bytes,
            scratch=NUM_SCRATCH_BUFFERS * self.largest_bundle_page_bytes,
        )

    def owned_bundles(self, group_rank: int) -> tuple[LayerBundle, ...]:
        """The bundles that `group_rank` keeps for good, in execution order."""
        return tuple(
            bundle for bundle, owner in zip(self.bundles, self.owner_ranks, strict=True) if owner == group_rank
        )

    @property
    def digest(self) -> str:
        """A short fingerprint: two ranks with the same digest have the same plan."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def plan_cache(caches: Iterable[LayerCache], *, group_size: int, draft_names: Set[str] = frozenset()) -> CachePlan:
    """Decide which rank of the group keeps which layer bundle.

    The result is the same on every rank: it depends on nothing but the arguments, and not on their order.

    Raises:
        KVPPConfigError: a draft layer has no cache of its own, or a cache's name has no layer number.
    """
    targets, drafts = split_draft_caches(caches, draft_names)
    bundles = bundle_by_layer(targets)
    return CachePlan(
        group_size=group_size,
        bundles=bundles,
        owner_ranks=assign_owner_ranks(len(bundles), group_size),
        draft_caches=drafts,
    )
