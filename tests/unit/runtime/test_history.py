import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.errors import KVPPOrderError
from vllm_kvpp.runtime.history import BlockTables, RequestUpdate, ScheduleUpdate

BLOCK_SIZE = 4


def begin(request_id, num_computed_tokens, block_ids, **changes):
    return RequestUpdate(request_id, num_computed_tokens, block_ids, replaces_blocks=True, **changes)


def advance(tables, *requests, finished=()):
    """The active blocks of the step that this output schedules."""
    return list(tables.advance(ScheduleUpdate(requests, finished)).active_blocks)


@pytest.fixture
def tables():
    return BlockTables(BLOCK_SIZE)


def test_a_first_prefill_reads_nothing_of_earlier_steps(tables):
    step = tables.advance(ScheduleUpdate([begin("a", 0, [3, 5])]))

    assert not step.has_history
    assert list(step.active_blocks) == []


@pytest.mark.parametrize(
    ("num_computed_tokens", "blocks"), [(1, [9]), (4, [9]), (5, [2, 9]), (8, [2, 9]), (9, [2, 7, 9])]
)
def test_the_history_takes_the_first_blocks_that_its_tokens_fill_or_begin(tables, num_computed_tokens, blocks):
    assert advance(tables, begin("a", num_computed_tokens, [9, 2, 7, 4])) == blocks


def test_a_step_reads_the_blocks_of_all_its_requests_each_once(tables):
    shared = begin("a", 8, [1, 2, 3]), begin("b", 8, [1, 2, 6]), begin("c", 0, [8])

    assert advance(tables, *shared) == [1, 2]


def test_new_blocks_follow_those_that_are_known(tables):
    advance(tables, begin("a", 0, [9]))
    advance(tables, RequestUpdate("a", 4, [2]))

    assert advance(tables, RequestUpdate("a", 8)) == [2, 9]


def test_a_resumed_request_starts_over_with_its_new_blocks(tables):
    advance(tables, begin("a", 0, [9, 2]))

    assert advance(tables, begin("a", 8, [5, 6, 7])) == [5, 6]


def test_new_blocks_of_an_equally_long_history_are_noticed(tables):
    advance(tables, begin("a", 0, [9, 2]))
    assert advance(tables, RequestUpdate("a", 8)) == [2, 9]

    assert advance(tables, begin("a", 8, [5, 6])) == [5, 6]


def test_a_request_without_scheduled_tokens_takes_no_part_but_keeps_its_blocks(tables):
    advance(tables, begin("a", 0, [9, 2]), begin("b", 0, [1]))
    assert advance(tables, RequestUpdate("a", 4, [7], num_tokens=0), RequestUpdate("b", 1)) == [1]

    assert advance(tables, RequestUpdate("a", 9)) == [2, 7, 9]


def test_a_name_may_be_used_again_in_the_step_that_ends_its_request(tables):
    advance(tables, begin("a", 0, [9]))

    assert advance(tables, begin("a", 1, [4]), finished=["a"]) == [4]


def test_a_finished_request_is_forgotten(tables):
    advance(tables, begin("a", 0, [9]))
    advance(tables, finished=["a"])

    with pytest.raises(KVPPOrderError, match="Request a goes on, but KVPP has not seen it begin"):
        advance(tables, RequestUpdate("a", 4))


def test_a_history_longer_than_its_blocks_is_refused(tables):
    with pytest.raises(KVPPOrderError, match=r"request a takes 2 blocks of 4 tokens, but the scheduler has named 1\."):
        advance(tables, begin("a", 5, [9]))


def test_the_blocks_of_a_step_that_reads_the_same_ones_are_the_same_object(tables):
    tables.advance(ScheduleUpdate([begin("a", 0, [9, 2])]))
    first = tables.advance(ScheduleUpdate([RequestUpdate("a", 5)]))

    assert tables.advance(ScheduleUpdate([RequestUpdate("a", 6)])).active_blocks is first.active_blocks


def test_a_step_describes_its_requests_with_their_tokens_and_blocks(tables):
    tables.advance(ScheduleUpdate([begin("a", 0, [9, 2]), begin("b", 0, [1])]))
    step = tables.advance(ScheduleUpdate([RequestUpdate("a", 5, [7], num_tokens=3), RequestUpdate("b", 2)]))

    first, second = step.requests
    assert (first.num_tokens, first.num_computed_tokens, list(first.blocks)) == (3, 5, [9, 2, 7])
    assert list(first.history_blocks) == [9, 2]
    assert (second.num_tokens, second.num_computed_tokens, list(second.history_blocks)) == (1, 2, [1])


def test_a_step_does_not_describe_requests_without_scheduled_tokens(tables):
    tables.advance(ScheduleUpdate([begin("a", 0, [9]), begin("b", 0, [1])]))
    step = tables.advance(ScheduleUpdate([RequestUpdate("a", 4, num_tokens=0), RequestUpdate("b", 1, num_tokens=2)]))

    assert [request.num_tokens for request in step.requests] == [2]


requests = st.lists(st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 24)), max_size=5)


@given(st.lists(requests, min_size=1, max_size=4))
def test_the_active_blocks_are_those_of_the_naive_count(steps):
    tables = BlockTables(BLOCK_SIZE)
    for step in steps:
        begun = [(blocks, min(count, BLOCK_SIZE * len(blocks))) for blocks, count in step]
        expected = {blocks[token // BLOCK_SIZE] for blocks, count in begun for token in range(count)}
        updates = [begin(str(number), count, blocks) for number, (blocks, count) in enumerate(begun)]

        assert advance(tables, *updates) == sorted(expected)
