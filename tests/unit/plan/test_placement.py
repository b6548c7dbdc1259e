from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.plan import LayerCache, place, plan_cache
from vllm_kvpp.plan.placement import RANGE_ALIGNMENT_BYTES, SCRATCH_ALIGNMENT_BYTES, scratch_index

PAGES = st.sampled_from([656 * 64, 1152 * 16, 1152 * 64, 576 * 128, 1000, 3])
INDEXER_PAGES = st.sampled_from([132 * 64, 17])


@st.composite
def placements(draw):
    """A placement of a random stage on a random rank."""
    num_layers = draw(st.integers(0, 12))
    caches = [LayerCache(f"layers.{number}.attn", draw(PAGES)) for number in range(num_layers)]
    sparse = draw(st.sets(st.integers(0, num_layers - 1))) if num_layers else set()
    caches += [LayerCache(f"layers.{number}.indexer", draw(INDEXER_PAGES)) for number in sparse]
    drafts = [LayerCache(f"draft.layers.{number}.attn", draw(PAGES)) for number in range(draw(st.integers(0, 2)))]
    group_size = draw(st.integers(1, 8))
    plan = plan_cache([*caches, *drafts], group_size=group_size, draft_names={cache.name for cache in drafts})
    tail_bytes = draw(st.sampled_from([0, 1, 65_536]))
    return place(plan, draw(st.integers(0, group_size - 1)), draw(st.integers(1, 500)), tail_bytes)


def kept_ranges(placement):
    """The ranges that this rank keeps for good."""
    return [
        *(bundle.range for bundle in placement.bundles if bundle.is_owned),
        *(draft.range for draft in placement.drafts),
    ]


def place_dense(*, group_size, group_rank, num_layers=6, num_blocks=100):
    plan = plan_cache(
        [LayerCache(f"layers.{number}.attn", 1152 * 16) for number in range(num_layers)], group_size=group_size
    )
    return place(plan, group_rank, num_blocks)


def place_sparse(*, group_rank, num_blocks=10):
    """Three layers on two ranks, of which the middle one alone has an indexer."""
    caches = [LayerCache(f"layers.{number}.attn", 1152) for number in range(3)]
    return place(plan_cache([*caches, LayerCache("layers.1.indexer", 132)], group_size=2), group_rank, num_blocks)


@given(placements())
def test_what_a_rank_keeps_never_overlaps_anything_else(placement):
    ranges = sorted(
        [*kept_ranges(placement), *placement.scratch, placement.tail], key=lambda found: (found.offset, found.end)
    )

    assert all(left.end <= right.offset for left, right in pairwise(ranges))


@given(placements())
def test_everything_lies_inside_the_allocation_and_fills_it_to_its_end(placement):
    ends = [found.end for found in (*kept_ranges(placement), *placement.scratch, placement.tail)]

    assert max(ends) == placement.num_bytes
    assert all(placed.range.end <= placement.num_bytes for placed in placement.caches)


@given(placements())
def test_a_bundle_is_one_contiguous_range_of_its_components(placement):
    for bundle in placement.bundles:
        position = bundle.range.offset
        for placed in bundle.components:
            assert placed.range.offset == position
            position = placed.range.end
        assert position == bundle.range.end


@given(placements())
def test_a_component_holds_all_blocks_page_after_page(placement):
    for placed in placement.caches:
        assert placed.range.num_bytes == placement.num_blocks * placed.cache.page_size_bytes


@given(placements())
def test_a_bundle_of_another_rank_lies_in_the_scratch_buffer_of_its_target_index(placement):
    for target_index, bundle in enumerate(placement.bundles):
        scratch = placement.scratch[target_index % 2]
        if not bundle.is_owned:
            assert bundle.range.offset == scratch.offset
            assert bundle.range.end <= scratch.end


@given(placements())
def test_scratch_buffers_start_at_2_mib_boundaries(placement):
    assert [scratch.offset % SCRATCH_ALIGNMENT_BYTES for scratch in placement.scratch] == [0, 0]


@given(placements())
def test_scratch_buffers_are_as_large_as_the_largest_bundle(placement):
    largest = max((bundle.range.num_bytes for bundle in placement.bundles), default=0)

    assert [scratch.num_bytes for scratch in placement.scratch] == [largest, largest]


@given(placements())
def test_what_a_rank_keeps_starts_where_a_device_allocator_would_put_it(placement):
    assert all(found.offset % RANGE_ALIGNMENT_BYTES == 0 for found in kept_ranges(placement))


def test_a_scratch_boundary_is_2_mib():
    assert SCRATCH_ALIGNMENT_BYTES == 2 * 1024 * 1024


def test_scratch_buffers_alternate_by_target_index():
    assert [scratch_index(target_index) for target_index in range(5)] == [0, 1, 0, 1, 0]


def test_owned_layers_count_when_scratch_buffers_alternate():
    placement = place_dense(group_size=3, group_rank=0, num_layers=9)
    offsets = [bundle.range.offset for bundle in placement.bundles if not bundle.is_owned]

    # Layers 0 to 2 are owned, so the first layer in a scratch buffer is layer 3, which has an odd index.
    second, first = placement.scratch[1].offset, placement.scratch[0].offset
    assert offsets == [second, first, second, first, second, first]


def test_owner_ranks_are_the_same_on_every_rank_and_ownership_is_not():
    placements_by_rank = [place_dense(group_size=2, group_rank=rank) for rank in range(2)]

    assert [[bundle.owner_rank for bundle in placement.bundles] for placement in placements_by_rank] == [
        [0, 0, 0, 1, 1, 1]
    ] * 2
    assert [[bundle.is_owned for bundle in placement.bundles] for placement in placements_by_rank] == [
        [True] * 3 + [False] * 3,
        [False] * 3 + [True] * 3,
    ]


def test_a_bundle_has_the_same_inner_layout_at_its_owner_and_elsewhere():
    at_owner, elsewhere = (place_sparse(group_rank=rank).bundles[1] for rank in range(2))
    offsets = [
        [placed.range.offset - bundle.range.offset for placed in bundle.components] for bundle in (at_owner, elsewhere)
    ]

    assert at_owner.is_owned
    assert not elsewhere.is_owned
    assert offsets == [[0, 11520], [0, 11520]]


def test_caches_are_listed_in_execution_order_with_drafts_last():
    caches = [LayerCache(f"layers.{number}.attn", 16) for number in (10, 2, 61, 0)]
    placement = place(plan_cache(caches, group_size=2, draft_names={"layers.61.attn"}), 1, 4)

    assert [placed.cache.name for placed in placement.caches] == [
        "layers.0.attn",
        "layers.2.attn",
        "layers.10.attn",
        "layers.61.attn",
    ]


@pytest.mark.parametrize("group_rank", [0, 1])
def test_every_rank_keeps_every_draft_cache(group_rank):
    caches = [LayerCache(f"layers.{number}.attn", 1152) for number in (0, 1, 2, 61)]
    placement = place(plan_cache(caches, group_size=2, draft_names={"layers.61.attn"}), group_rank, 4)

    assert [draft.range.num_bytes for draft in placement.drafts] == [4 * 1152]


def test_a_rank_that_owns_nothing_stores_two_scratch_buffers():
    placement = place_dense(group_size=8, group_rank=7, num_blocks=1000)
    num_bytes = 1000 * 1152 * 16

    # 18,432,000 bytes end inside their ninth 2 MiB.
    assert placement.scratch[1].offset == 9 * 2 * 1024 * 1024
    assert placement.num_bytes == 9 * 2 * 1024 * 1024 + num_bytes


def test_a_stage_with_draft_layers_only_stores_nothing_else():
    caches = [LayerCache(f"layers.{number}.attn", 1000) for number in (61, 62)]
    placement = place(plan_cache(caches, group_size=4, draft_names={cache.name for cache in caches}), 2, 1)

    assert placement.bundles == ()
    assert [draft.range.offset for draft in placement.drafts] == [0, 1024]
    assert placement.num_bytes == 2024
