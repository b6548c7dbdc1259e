import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.plan import StageShape, choose_way
from vllm_kvpp.plan.transfer_way import estimate_cost
from vllm_kvpp.selection import BlockRuns, LinkTraits, Way

SHAPE = StageShape(num_blocks=1000, num_layers=8, num_components=12, page_size_bytes=200_000)
FREE_CALLS = LinkTraits(call_bytes=0, staging_factor=0.3, blocks_per_chunk=10)
DEAR_CALLS = LinkTraits(call_bytes=1_000_000, staging_factor=0.3, blocks_per_chunk=10)
NO_STAGING = LinkTraits(call_bytes=1_000_000)
ONE_RUN = BlockRuns(((3, 23),))
SCATTERED = BlockRuns.of(range(0, 40, 2))
EVERY_OTHER = BlockRuns.of(range(0, 1000, 2))
ALL = BlockRuns(((0, 1000),))


@pytest.mark.parametrize("blocks", [ONE_RUN, SCATTERED, ALL])
@pytest.mark.parametrize("link", [FREE_CALLS, DEAR_CALLS, NO_STAGING])
def test_full_moves_whole_bundles_whatever_it_costs(blocks, link):
    assert choose_way("full", blocks, SHAPE, link) is Way.WHOLE


@pytest.mark.parametrize("mode", ["auto", "active"])
@pytest.mark.parametrize(
    ("blocks", "link", "way"),
    [(ONE_RUN, FREE_CALLS, Way.RUNS), (SCATTERED, FREE_CALLS, Way.RUNS), (SCATTERED, DEAR_CALLS, Way.STAGED)],
)
def test_scattered_blocks_are_gathered_where_calls_are_dear(mode, blocks, link, way):
    assert choose_way(mode, blocks, SHAPE, link) is way


def test_without_staging_memory_scattered_blocks_move_in_runs_or_with_the_whole():
    assert choose_way("active", EVERY_OTHER, SHAPE, NO_STAGING) is Way.RUNS
    assert choose_way("auto", EVERY_OTHER, SHAPE, NO_STAGING) is Way.WHOLE


def test_auto_moves_whole_bundles_when_nearly_all_blocks_are_active_but_scattered():
    nearly_all = BlockRuns.of(block_id for block_id in range(1000) if block_id % 20)

    assert choose_way("auto", nearly_all, SHAPE, DEAR_CALLS) is Way.WHOLE
    assert choose_way("active", nearly_all, SHAPE, DEAR_CALLS) is not Way.WHOLE


def test_calls_are_counted_by_layer_by_run_and_by_chunk():
    blocks = BlockRuns.of([1, 2, 5, 9, 10])

    assert SHAPE.count_calls(Way.WHOLE, blocks, 2) == 8
    assert SHAPE.count_calls(Way.RUNS, blocks, 2) == 12 * 3
    assert SHAPE.count_calls(Way.STAGED, blocks, 2) == 8 * 3


@pytest.mark.parametrize(
    ("way", "cost"),
    [
        (Way.WHOLE, 1000 * 200_000 + 8 * 1_000),
        (Way.RUNS, 5 * 200_000 + 12 * 3 * 1_000),
        (Way.STAGED, 5 * 200_000 * 1.5 + 8 * 3 * 1_000),
    ],
)
def test_a_way_costs_its_bytes_its_calls_its_staging_and_a_price_for_each_layer(way, cost):
    link = LinkTraits(call_bytes=1_000, layer_bytes=70, staging_factor=0.5, blocks_per_chunk=2)

    assert estimate_cost(way, BlockRuns.of([1, 2, 5, 9, 10]), SHAPE, link) == cost + 8 * 70


@given(st.sets(st.integers(0, 999), min_size=1), st.integers(0, 10**7), st.floats(0, 2), st.integers(0, 50))
def test_auto_is_never_estimated_dearer_than_another_mode(ids, call_bytes, staging_factor, blocks_per_chunk):
    link = LinkTraits(call_bytes, staging_factor=staging_factor, blocks_per_chunk=blocks_per_chunk)
    blocks = BlockRuns.of(ids)

    def estimate(mode):
        way = choose_way(mode, blocks, SHAPE, link)
        assert way is not Way.STAGED or blocks_per_chunk > 0
        copies = staging_factor if way is Way.STAGED else 0
        calls = SHAPE.count_calls(way, blocks, blocks_per_chunk)
        return SHAPE.bytes_moved(way, blocks) * (1 + copies) + call_bytes * calls

    assert estimate("auto") <= min(estimate("full"), estimate("active"))
