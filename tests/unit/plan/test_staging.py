import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.errors import KVPPBudgetError
from vllm_kvpp.plan import LayerCache, fit_num_blocks, place, plan_cache, plan_staging

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
