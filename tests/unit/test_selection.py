from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.selection import BlockRuns, QueryShape

block_ids = st.lists(st.integers(0, 60))


def test_consecutive_blocks_are_one_run():
    assert BlockRuns.of([4, 9, 3, 2, 9, 8, 0]).runs == ((0, 1), (2, 5), (8, 10))


def test_no_blocks_are_no_runs():
    assert not BlockRuns.of([])
    assert BlockRuns.of([]).runs == ()
    assert BlockRuns.of([0])


@given(block_ids)
def test_runs_hold_exactly_the_blocks_they_were_made_of(ids):
    blocks = BlockRuns.of(ids)

    assert list(blocks) == sorted(set(ids))
    assert blocks.num_blocks == len(set(ids))


@given(block_ids)
def test_between_two_runs_there_is_a_gap(ids):
    runs = BlockRuns.of(ids).runs

    assert all(first < end for first, end in runs)
    assert all(end < first for (_, end), (first, _) in pairwise(runs))


@given(block_ids, st.integers(1, 12))
def test_parts_hold_all_blocks_in_order_and_none_more_than_the_most(ids, max_blocks):
    blocks = BlockRuns.of(ids)
    parts = blocks.split(max_blocks)

    assert [block_id for part in parts for block_id in part] == list(blocks)
    # All but the last are full.
    assert all(part.num_blocks == max_blocks for part in parts[:-1])
    assert all(0 < part.num_blocks <= max_blocks for part in parts)


def test_a_set_of_no_blocks_is_a_bug_of_ours():
    with pytest.raises(AssertionError, match="a set of no blocks"):
        BlockRuns.of([1]).split(0)


def test_an_owner_attends_the_heads_of_all_other_ranks_for_them():
    shape = QueryShape(num_heads=12, group_size=3, query_width=7, output_width=5, element_bytes=2)

    assert (shape.heads_per_rank, shape.num_peer_heads) == (4, 8)


def test_a_head_of_a_row_is_its_query_and_its_output():
    shape = QueryShape(num_heads=12, group_size=3, query_width=7, output_width=5, element_bytes=2)

    assert shape.head_bytes == (7 + 5) * 2


@pytest.mark.parametrize(("num_choices", "choice_bytes"), [(0, 0), (2048, 8192)])
def test_choices_are_numbers_of_four_bytes_whatever_the_queries_are(num_choices, choice_bytes):
    shape = QueryShape(12, 3, query_width=7, output_width=5, element_bytes=2, num_choices=num_choices)

    assert shape.choice_bytes == choice_bytes
    # Its own heads once, those of all ranks by row and by rank; outputs take the place of the queries.
    assert shape.exchange_row_bytes == (4 + 12 + 12) * 7 * 2 + choice_bytes


def test_an_output_wider_than_its_query_has_room():
    shape = QueryShape(num_heads=12, group_size=3, query_width=5, output_width=8, element_bytes=2)

    assert shape.exchange_row_bytes == (4 + 12 + 12) * 8 * 2
