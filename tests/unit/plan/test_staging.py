import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.errors import KVPPBudgetError
from vllm_kvpp.plan import LayerCache, fit_num_blocks, place, plan_cache, plan_exchange, plan_staging
from vllm_kvpp.selection import QueryShape

MIB = 1024 * 1024
PAGE = 64 * 1024


def plan_layers(num_layers=6, group_size=2, page=PAGE):
    return plan_cache(
        [LayerCache(f"layers.{number}.attn", page) for number in range(num_layers)], group_size=group_size
    )


@pytest.mark.parametrize(
    ("available_bytes", "staging_bytes"),
    [(1024 * MIB, 16 * MIB), (64 * 1024 * MIB, 64 * MIB), (2 * MIB, PAGE), (300_000, 0), (0, 0)],
)
def test_the_default_is_a_small_share_up_to_a_limit_and_nothing_where_little_is_available(
    available_bytes, staging_bytes
):
    assert plan_staging(plan_layers(), 0, available_bytes, None) == staging_bytes


def test_the_size_asked_for_is_taken_as_it_is():
    assert plan_staging(plan_layers(), 0, 1024 * MIB, 100 * MIB) == 100 * MIB


@pytest.mark.parametrize("asked_bytes", [PAGE - 1, 10 * MIB - 5 * PAGE + 1, 10 * MIB, 11 * MIB])
def test_a_size_that_holds_no_block_or_leaves_none_is_refused_with_the_range(asked_bytes):
    with pytest.raises(KVPPBudgetError) as caught:
        plan_staging(plan_layers(), 0, 10 * MIB, asked_bytes)
    assert "has to be between 0.0625 (one block of the largest layer) and 9.6875 (which leaves one block" in str(
        caught.value
    )


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 40 * MIB))
def test_staging_memory_and_blocks_fit_together_into_what_is_available(num_layers, group_size, available_bytes):
    plan = plan_layers(num_layers, group_size)
    for rank in range(group_size):
        staging_bytes = plan_staging(plan, rank, available_bytes, None)
        num_blocks = fit_num_blocks(plan, rank, available_bytes, staging_bytes)

        assert place(plan, rank, num_blocks, staging_bytes).num_bytes <= available_bytes or num_blocks == 0
        if num_blocks:
            assert place(plan, rank, num_blocks + 1, staging_bytes).num_bytes > available_bytes


# 128 heads of DeepSeek-V3 in bfloat16 on 8 ranks: a row takes 272 heads of 1152 bytes.
QUERIES = QueryShape(128, 8, query_width=576, output_width=512, element_bytes=2)
ROW = 272 * 1152


def test_a_row_takes_its_heads_once_for_its_rank_and_twice_for_all_ranks():
    assert QUERIES.exchange_row_bytes == ROW


@pytest.mark.parametrize(
    ("available_bytes", "num_rows"),
    [(128 * ROW, 1), (128 * ROW * 2 - 1, 1), (1024 * MIB, 26), (128 * 1024 * MIB, 512), (10**15, 512)],
)
def test_the_exchange_gets_whole_rows_out_of_a_small_share_up_to_a_number(available_bytes, num_rows):
    num_bytes = plan_exchange(QUERIES, available_bytes)

    assert num_bytes // ROW == num_rows
    assert num_bytes - num_rows * ROW < 512


def test_the_exchange_of_narrow_queries_gets_no_more_rows_than_a_decode_step_has():
    narrow = QueryShape(4, 2, query_width=64, output_width=64, element_bytes=2)

    assert plan_exchange(narrow, 10**12) == 512 * narrow.exchange_row_bytes


def test_a_budget_too_small_for_a_row_gives_the_exchange_nothing():
    assert plan_exchange(QUERIES, 128 * ROW - 1) == 0


def test_where_nothing_attends_at_the_owner_the_exchange_gets_nothing():
    assert plan_exchange(None, 10**12) == 0


shapes = st.builds(
    lambda group_size, heads, *widths: QueryShape(group_size * heads, group_size, *widths),
    st.integers(1, 8),
    st.integers(1, 16),
    st.integers(1, 576),
    st.integers(1, 512),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 4, 2048]),
)


@given(shapes, st.integers(0, 10**11))
def test_what_lies_behind_the_exchange_begins_where_a_range_may(shape, available_bytes):
    num_bytes = plan_exchange(shape, available_bytes)

    assert num_bytes % 512 == 0
    assert num_bytes == 0 or num_bytes >= shape.exchange_row_bytes
    assert num_bytes < max(available_bytes // 128, 1) + 512
