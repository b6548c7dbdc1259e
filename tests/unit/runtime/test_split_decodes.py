"""Which of a step's requests decode, from the schedule and the number of decode rows in the batch."""

from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.runtime.history import DecodeRows, Step, StepRequest
from vllm_kvpp.selection import BlockRuns

BLOCK_SIZE = 4


def request(num_tokens, num_computed_tokens=0, first_block=0):
    """A request whose blocks begin with `first_block` and follow each other."""
    num_history_blocks = -(-num_computed_tokens // BLOCK_SIZE)
    num_blocks = -(-(num_computed_tokens + num_tokens) // BLOCK_SIZE)
    return StepRequest(
        num_tokens, num_computed_tokens, num_history_blocks, list(range(first_block, first_block + num_blocks))
    )


def step_of(*requests):
    return Step(BlockRuns.of(block for request in requests for block in request.history_blocks), requests)


MIXED = (request(1, 9, 10), request(7, 8, 20), request(1, 4, 30), request(3, 0, 40))


def test_requests_with_the_fewest_tokens_decode_and_the_others_are_left():
    share = step_of(*MIXED).split_decodes(DecodeRows(num_requests=2, num_rows=2))

    assert share.num_rows == 2
    assert share.has_others
    assert list(share.other_blocks) == [20, 21]


def test_a_decode_row_attends_to_its_history_and_to_the_new_tokens():
    share = step_of(*MIXED).split_decodes(DecodeRows(2, 2))

    assert share.num_attended_tokens == (9 + 1) + (4 + 1)


def test_a_sparse_row_attends_to_no_more_than_what_is_chosen_for_it():
    share = step_of(*MIXED).split_decodes(DecodeRows(2, 2), most_attended=7)

    assert share.num_attended_tokens == 7 + (4 + 1)


def test_each_of_several_rows_of_a_request_attends():
    share = step_of(request(3, 10), request(8, 0, 20)).split_decodes(DecodeRows(1, 3))

    assert share.num_attended_tokens == 3 * 13


def test_where_all_requests_decode_none_is_left():
    share = step_of(*MIXED[:1], *MIXED[2:3]).split_decodes(DecodeRows(2, 2))

    assert (share.has_others, share.other_blocks) == (False, BlockRuns())


def test_others_without_history_are_there_but_leave_no_blocks():
    share = step_of(MIXED[0], MIXED[3]).split_decodes(DecodeRows(1, 1))

    assert (share.has_others, share.other_blocks) == (True, BlockRuns())


def test_blocks_that_a_decode_shares_with_another_request_are_left_for_the_other():
    share = step_of(request(1, 8, 10), request(5, 8, 10)).split_decodes(DecodeRows(1, 1))

    assert list(share.other_blocks) == [10, 11]


def test_another_request_with_as_few_tokens_leaves_it_open():
    assert step_of(*MIXED).split_decodes(DecodeRows(1, 1)) is None


@pytest.mark.parametrize("rows", [DecodeRows(2, 3), DecodeRows(3, 3), DecodeRows(0, 0), DecodeRows(4, 11)])
def test_rows_that_the_schedule_does_not_have_are_no_decodes(rows):
    assert step_of(*MIXED).split_decodes(rows) is None


def test_a_step_without_requests_has_no_decodes():
    assert Step().split_decodes(DecodeRows(1, 1)) is None
    assert Step().split_decodes(DecodeRows(0, 0)) is None


def test_the_order_of_the_requests_does_not_matter():
    shares = {step_of(*order).split_decodes(DecodeRows(2, 2)) for order in permutations(MIXED)}

    assert len(shares) == 1
    assert None not in shares


schedules = st.lists(
    st.builds(request, st.integers(1, 6), st.integers(0, 20), st.integers(0, 5).map(lambda number: 10 * number)),
    min_size=1,
    max_size=6,
)


def expected_blocks(others):
    return sorted({block for other in others for block in other.history_blocks})


@given(schedules, st.integers(1, 6), st.randoms())
def test_the_requests_up_to_a_number_of_tokens_are_found_whatever_their_order(requests, most_tokens, generator):
    decodes = [request for request in requests if request.num_tokens <= most_tokens]
    others = [request for request in requests if request.num_tokens > most_tokens]
    shuffled = generator.sample(requests, k=len(requests))
    share = step_of(*shuffled).split_decodes(DecodeRows(len(decodes), sum(each.num_tokens for each in decodes)))

    if not decodes:
        assert share is None
        return
    assert share.num_rows == sum(each.num_tokens for each in decodes)
    assert share.num_attended_tokens == sum(
        each.num_tokens * (each.num_computed_tokens + each.num_tokens) for each in decodes
    )
    assert share.has_others == bool(others)
    assert list(share.other_blocks) == expected_blocks(others)


@given(schedules, st.data())
def test_whatever_part_of_the_batch_decodes_is_found_exactly_or_not_at_all(requests, data):
    numbers = data.draw(st.sets(st.sampled_from(range(len(requests)))))
    decodes = [requests[number] for number in numbers]
    others = [request for number, request in enumerate(requests) if number not in numbers]
    share = step_of(*requests).split_decodes(DecodeRows(len(decodes), sum(each.num_tokens for each in decodes)))

    if share is not None:
        assert list(share.other_blocks) == expected_blocks(others)
        assert share.has_others == bool(others)
        # No other choice of as many requests has the same rows.
        same_rows = [
            chosen
            for chosen in combinations(requests, len(decodes))
            if sum(each.num_tokens for each in chosen) == share.num_rows
        ]
        assert len(same_rows) == 1
