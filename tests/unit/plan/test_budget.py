from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.plan import CachePlan, LayerCache, fit_num_blocks, place, plan_cache

MIB = 1024 * 1024
GIB = 1024 * MIB

PAGES = st.sampled_from([656 * 64, 1152 * 16, 1152 * 64, 576 * 128, 1000])


@st.composite
def plans(draw):
    """A plan of a random stage with at least one cache, and one of its ranks."""
    num_layers = draw(st.integers(0, 30))
    num_drafts = draw(st.integers(0 if num_layers else 1, 2))
    caches = [LayerCache(f"layers.{number}.attn", draw(PAGES)) for number in range(num_layers)]
    caches += [LayerCache(f"layers.{number}.indexer", 132 * 64) for number in range(0, num_layers, 4)]
    drafts = [LayerCache(f"draft.layers.{number}.attn", draw(PAGES)) for number in range(num_drafts)]
    group_size = draw(st.integers(1, 16))
    plan = plan_cache([*caches, *drafts], group_size=group_size, draft_names={cache.name for cache in drafts})
    return plan, draw(st.integers(0, group_size - 1))


def alignment_bytes(plan, rank):
    """The most that alignment can take: one gap before scratch 1, one before each range that the rank keeps."""
    return 2 * MIB + 512 * (len(plan.owned_bundles(rank)) + len(plan.draft_caches))


def count_up(plan, rank, available_bytes):
    """The slow obvious way: one block more, as long as the allocation fits."""
    most = available_bytes // plan.bytes_per_block(rank).total
    fitting = takewhile(lambda count: place(plan, rank, count).num_bytes <= available_bytes, range(1, most + 2))
    return max(fitting, default=0)


@given(plans(), st.integers(0, 200 * GIB))
def test_what_is_allocated_never_exceeds_what_was_available(plan_and_rank, available_bytes):
    plan, rank = plan_and_rank
    num_blocks = fit_num_blocks(plan, rank, available_bytes)

    assert num_blocks == 0 or place(plan, rank, num_blocks).num_bytes <= available_bytes


@given(plans(), st.integers(0, 200 * GIB))
def test_one_block_more_would_not_fit(plan_and_rank, available_bytes):
    plan, rank = plan_and_rank
    num_blocks = fit_num_blocks(plan, rank, available_bytes)

    assert place(plan, rank, num_blocks + 1).num_bytes > available_bytes


@given(plans(), st.integers(0, 200 * GIB))
def test_blocks_are_available_bytes_over_bytes_per_block_less_what_alignment_takes(plan_and_rank, available_bytes):
    plan, rank = plan_and_rank
    bytes_per_block = plan.bytes_per_block(rank).total
    num_blocks = fit_num_blocks(plan, rank, available_bytes)
    without_alignment = max(available_bytes - alignment_bytes(plan, rank), 0) // bytes_per_block

    assert without_alignment <= num_blocks <= available_bytes // bytes_per_block


@given(plans(), st.integers(0, 20 * MIB))
def test_blocks_equal_those_of_counting_up(plan_and_rank, available_bytes):
    plan, rank = plan_and_rank

    assert fit_num_blocks(plan, rank, available_bytes) == count_up(plan, rank, available_bytes)


@given(plans(), st.integers(1, 100_000))
def test_memory_for_exactly_so_many_blocks_holds_so_many(plan_and_rank, num_blocks):
    plan, rank = plan_and_rank

    assert fit_num_blocks(plan, rank, place(plan, rank, num_blocks).num_bytes) == num_blocks
    assert fit_num_blocks(plan, rank, place(plan, rank, num_blocks).num_bytes - 1) == num_blocks - 1


def dense_plan(num_layers=6, group_size=2):
    return plan_cache(
        [LayerCache(f"layers.{number}.attn", 1152 * 16) for number in range(num_layers)], group_size=group_size
    )


def test_a_gibibyte_holds_six_fifths_of_six_layers_on_two_ranks():
    without = GIB // dense_plan().full_bytes_per_block

    # vLLM's own log counts 155,344 tokens of this model without KVPP, in blocks of 16.
    assert without * 16 == 155_344
    assert fit_num_blocks(dense_plan(), 0, GIB) == pytest.approx(without * 6 / 5, rel=2e-3)


def test_nothing_to_store_needs_no_blocks():
    assert fit_num_blocks(CachePlan(group_size=2, bundles=(), owner_ranks=()), 0, GIB) == 0


@pytest.mark.parametrize("available_bytes", [-1, 0, 1, 5 * 1152 * 16 - 1])
def test_memory_for_less_than_one_block_holds_none(available_bytes):
    assert fit_num_blocks(dense_plan(), 0, available_bytes) == 0


def test_memory_for_one_block_without_its_alignment_holds_none():
    assert fit_num_blocks(dense_plan(), 0, 5 * 1152 * 16) == 0


def test_memory_for_one_block_and_its_alignment_holds_one():
    assert fit_num_blocks(dense_plan(), 0, 2 * MIB + 4 * 1152 * 16) == 1


def test_a_rank_that_owns_fewer_layers_has_room_for_more_blocks():
    plan = dense_plan(num_layers=7)

    assert fit_num_blocks(plan, 1, GIB) > fit_num_blocks(plan, 0, GIB)
