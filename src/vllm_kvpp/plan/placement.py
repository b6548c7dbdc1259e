"""Where every cache of one rank lies inside its one backing allocation, and how many blocks fit (R-LAY, R-MEM).

Offsets are bytes from the start of the allocation. It is laid out as

```text
| scratch 0 | gap | scratch 1 | owned bundle | owned bundle | … | draft cache | … | tail |
0                 2 MiB boundary
```

and a bundle, in its scratch buffer or at its owner, as `[component][block][page]`.
"""

from bisect import bisect_right
from dataclasses import dataclass

from vllm_kvpp.plan.bundles import LayerBundle, LayerCache
from vllm_kvpp.plan.cache_plan import NUM_SCRATCH_BUFFERS, CachePlan

SCRATCH_ALIGNMENT_BYTES = 2 * 1024 * 1024
# Kernels load in vectors of up to 128 bytes; a persistent range starts where a device allocator would have put it.
RANGE_ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class ByteRange:
    """Half-open `[offset, offset + num_bytes)` in the backing allocation."""

    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The first byte behind the range."""
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class PlacedCache:
    """One cache tensor: all its blocks, one page after another."""

    cache: LayerCache
    range: ByteRange


@dataclass(frozen=True)
class PlacedBundle:
    """One target layer's bundle, at its owner or in a scratch buffer."""

    bundle: LayerBundle
    owner_rank: int
    is_owned: bool
    range: ByteRange
    components: tuple[PlacedCache, ...]


@dataclass(frozen=True)
class Placement:
    """Everything one rank stores for `num_blocks` blocks; `bundles` are in execution order.

    `tail` holds no cache: it is staging memory, or the rest of a page that cannot be shared, and may be empty.
    """

    num_blocks: int
    bundles: tuple[PlacedBundle, ...]
    drafts: tuple[PlacedCache, ...]
    scratch: tuple[ByteRange, ...]
    tail: ByteRange

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole allocation."""
        return self.tail.end

    @property
    def caches(self) -> tuple[PlacedCache, ...]:
        """All cache tensors: target layers in execution order, then draft layers."""
        return (*(placed for bundle in self.bundles for placed in bundle.components), *self.drafts)


def scratch_index(target_index: int) -> int:
    """The scratch buffer of a target layer, by its place in execution order, owned layers included (R-LAY-3)."""
    return target_index % NUM_SCRATCH_BUFFERS


def place(plan: CachePlan, group_rank: int, num_blocks: int, tail_bytes: int = 0) -> Placement:
    """Lay out one rank's allocation."""
    scratch = _place_scratch(plan, num_blocks)
    cursor = scratch[-1].end
    bundles: list[PlacedBundle] = []
    for target_index, (bundle, owner_rank) in enumerate(zip(plan.bundles, plan.owner_ranks, strict=True)):
        num_bytes = bundle.page_size_bytes * num_blocks
        is_owned = owner_rank == group_rank
        start = scratch[scratch_index(target_index)].offset
        if is_owned:
            start = align_range(cursor)
            cursor = start + num_bytes
        components = _place_in_sequence(bundle.components, start, num_blocks)
        bundles.append(PlacedBundle(bundle, owner_rank, is_owned, ByteRange(start, num_bytes), components))
    drafts: list[PlacedCache] = []
    for cache in plan.draft_caches:
        (placed,) = _place_in_sequence((cache,), align_range(cursor), num_blocks)
        cursor = placed.range.end
        drafts.append(placed)
    tail = ByteRange(align_range(cursor) if tail_bytes else cursor, tail_bytes)
    return Placement(num_blocks, tuple(bundles), tuple(drafts), scratch, tail)


def fit_num_blocks(plan: CachePlan, group_rank: int, available_bytes: int, tail_bytes: int = 0) -> int:
    """How many blocks fit on this rank: R-MEM-1, less what the tail and alignment take (R-MEM-3).

    Returns 0 when there is nothing to store, and when not even one block fits.
    """
    bytes_per_block = plan.bytes_per_block(group_rank).total
    if bytes_per_block == 0 or available_bytes < bytes_per_block:
        return 0
    # The bytes needed grow with the number of blocks, so the counts that fit are a prefix of this range.
    counts = range(1, available_bytes // bytes_per_block + 1)
    return bisect_right(counts, available_bytes, key=lambda count: place(plan, group_rank, count, tail_bytes).num_bytes)


def _place_scratch(plan: CachePlan, num_blocks: int) -> tuple[ByteRange, ...]:
    num_bytes = plan.largest_bundle_page_bytes * num_blocks
    distance = _align(num_bytes, SCRATCH_ALIGNMENT_BYTES)
    return tuple(ByteRange(index * distance, num_bytes) for index in range(NUM_SCRATCH_BUFFERS))


def _place_in_sequence(caches: tuple[LayerCache, ...], start: int, num_blocks: int) -> tuple[PlacedCache, ...]:
    placed: list[PlacedCache] = []
    for cache in caches:
        num_bytes = cache.page_size_bytes * num_blocks
        placed.append(PlacedCache(cache, ByteRange(start, num_bytes)))
        start += num_bytes
    return tuple(placed)


def align_range(offset: int) -> int:
    """The first place at or behind `offset` where a persistent range may begin."""
    return _align(offset, RANGE_ALIGNMENT_BYTES)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
