from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.selection import QueryShape
from vllm_kvpp.transport.exchange import ExchangeArea, write_query

SHAPE = QueryShape(num_heads=6, group_size=3, query_width=5, output_width=4, element_bytes=2, num_choices=8)
VIEWS = (
    "own_query",
    "all_queries",
    "queries_by_rank",
    "own_output",
    "all_outputs",
    "outputs_by_rank",
    "choices",
)


# What shares memory: queries and outputs take turns.
SECTIONS = (
    ("own_query", "own_output"),
    ("all_queries",),
    ("queries_by_rank", "outputs_by_rank", "all_outputs"),
    ("choices",),
)


def make_area(num_rows, shape=SHAPE, dtype=torch.bfloat16, *, spare_bytes=0):
    memory = torch.zeros(num_rows * shape.exchange_row_bytes + spare_bytes, dtype=torch.uint8)
    return ExchangeArea(memory, shape, dtype), memory


def find_range(view, memory):
    """The bytes of a view, as a half-open range in the memory; it is contiguous."""
    assert view.is_contiguous()
    start = view.data_ptr() - memory.data_ptr()
    return start, start + view.numel() * view.element_size()


def find_section(area, views, memory):
    """The bytes of the views that share a section; None if there are none. They begin at the same place."""
    ranges = [find_range(getattr(area, name), memory) for name in views]
    assert len({start for start, _ in ranges}) == 1
    found = ranges[0][0], max(end for _, end in ranges)
    return found if found[1] > found[0] else None


def test_a_fresh_area_is_cut_for_as_many_rows_as_it_holds():
    area, _ = make_area(4, spare_bytes=SHAPE.exchange_row_bytes - 1)

    assert area.max_rows == 4
    assert area.own_query.shape[0] == 4


def test_each_section_has_rows_heads_and_width():
    area, _ = make_area(4)
    area.cut(3)

    assert {name: tuple(getattr(area, name).shape) for name in VIEWS} == {
        "own_query": (3, 2, 5),
        "all_queries": (3, 6, 5),
        "queries_by_rank": (3, 3, 2, 5),
        "own_output": (3, 2, 4),
        "all_outputs": (3, 6, 4),
        "outputs_by_rank": (3, 3, 2, 4),
        "choices": (3, 8),
    }
    assert {getattr(area, name).dtype for name in VIEWS[:-1]} == {torch.bfloat16}
    assert area.choices.dtype == torch.int32


def test_without_indexers_there_are_no_choices():
    area, _ = make_area(4, QueryShape(6, 3, query_width=5, output_width=4, element_bytes=2))

    assert area.choices.shape == (4, 0)


def test_what_a_view_writes_lies_in_the_memory():
    area, memory = make_area(4)
    area.own_query.fill_(1.0)

    assert memory.any()


def test_an_area_too_small_for_a_row_holds_none():
    area, _ = make_area(0, spare_bytes=SHAPE.exchange_row_bytes - 1)

    assert area.max_rows == 0


def test_more_rows_than_an_area_holds_are_a_bug_of_ours():
    area, _ = make_area(4)

    with pytest.raises(AssertionError, match="5 rows in memory for 4"):
        area.cut(5)


def test_elements_of_another_size_are_a_bug_of_ours():
    with pytest.raises(AssertionError, match=r"torch\.float32 has not 2 bytes"):
        make_area(4, dtype=torch.float32)


@pytest.mark.parametrize(("rank", "heads"), [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])])
def test_heads_lie_by_rank(rank, heads):
    area, _ = make_area(4)

    assert list(range(6))[area.heads_of(rank)] == heads


def test_the_parts_of_a_query_lie_side_by_side():
    target = torch.zeros(2, 2, 5)
    first, second = torch.full((2, 2, 3), 1.0), torch.full((2, 2, 2), 2.0)
    write_query((first, second), target)

    assert torch.equal(target, torch.cat((first, second), dim=-1))


def test_a_query_is_written_into_some_of_the_heads():
    target = torch.zeros(2, 4, 5)
    query = torch.arange(20.0).view(2, 2, 5)
    write_query((query[..., :3], query[..., 3:]), target[:, 2:])

    assert torch.equal(target, torch.cat((torch.zeros(2, 2, 5), query), dim=1))


@pytest.mark.parametrize("target_shape", [(2, 2, 4), (2, 2, 6), (1, 2, 5), (3, 2, 5), (2, 1, 5)])
def test_a_query_of_another_shape_is_a_bug_of_ours(target_shape):
    target = torch.zeros(target_shape)
    with pytest.raises(AssertionError, match="a query 5 wide"):
        write_query((torch.ones(2, 2, 3), torch.ones(2, 2, 2)), target)

    assert not target.any()


sizes = st.tuples(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 2, 16])
)


@given(sizes, st.integers(1, 8), st.integers(0, 63), st.data())
def test_sections_are_disjoint_and_inside_the_area_for_every_shape_and_number_of_rows(
    sizes, max_rows, spare_bytes, data
):
    group_size, heads_per_rank, query_width, output_width, num_choices = sizes
    shape = QueryShape(group_size * heads_per_rank, group_size, query_width, output_width, 4, num_choices)
    area, memory = make_area(max_rows, shape, torch.float32, spare_bytes=spare_bytes % shape.exchange_row_bytes)
    area.cut(data.draw(st.integers(1, area.max_rows)))
    ranges = sorted(found for views in SECTIONS if (found := find_section(area, views, memory)) is not None)

    assert area.max_rows == max_rows
    assert ranges[0][0] >= 0
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert ranges[-1][1] <= memory.numel()


@given(sizes, st.integers(2, 8), st.data())
def test_each_section_begins_at_the_same_place_whatever_the_number_of_rows(sizes, max_rows, data):
    group_size, heads_per_rank, query_width, output_width, num_choices = sizes
    shape = QueryShape(group_size * heads_per_rank, group_size, query_width, output_width, 4, num_choices)
    area, memory = make_area(max_rows, shape, torch.float32)
    before = [find_range(getattr(area, name), memory)[0] for name in VIEWS]
    area.cut(data.draw(st.integers(1, max_rows)))

    assert [find_range(getattr(area, name), memory)[0] for name in VIEWS] == before


@pytest.fixture(params=["make_peer_ranks", "make_collective_ranks"], ids=["peers", "collectives"])
def ranks(request):
    """The ranks of a group of three with each kind of exchange."""
    return request.getfixturevalue(request.param)()


@pytest.mark.parametrize("owner_rank", range(3))
def test_the_owner_gets_the_queries_of_all_heads_by_rank(ranks, owner_rank):
    ranks.prepare(2)
    gathered = [queries for queries, _ in ranks.attend_everywhere(owner_rank, 2)]

    assert [rank for rank in range(3) if gathered[rank] is not None] == [owner_rank]
    assert torch.equal(gathered[owner_rank], ranks.all_queries(2))


@pytest.mark.parametrize("owner_rank", range(3))
def test_each_rank_gets_the_output_of_its_own_heads(ranks, owner_rank):
    ranks.prepare(2)

    for rank, (_, output) in enumerate(ranks.attend_everywhere(owner_rank, 2)):
        assert torch.equal(output, ranks.expected_output(rank, 2))


def test_attentions_of_a_step_follow_each_other_without_another_meeting(ranks):
    ranks.prepare(2)
    outputs = ranks.run_everywhere(lambda rank: [ranks.attend(rank, number % 3, 2, number)[1] for number in range(12)])

    for rank in range(3):
        for number in range(12):
            assert torch.equal(outputs[rank][number], ranks.expected_output(rank, 2, number))


def test_rows_may_change_from_step_to_step(ranks):
    for seed, num_rows in enumerate((2, 8, 1, 1, 3)):
        ranks.prepare(num_rows)
        for rank, (_, output) in enumerate(ranks.attend_everywhere(seed % 3, num_rows, seed)):
            assert torch.equal(output, ranks.expected_output(rank, num_rows, seed))


def test_an_output_is_contiguous_memory_of_the_rank_itself(ranks):
    ranks.prepare(2)

    def attend(rank):
        ranks.exchanges[rank].gather(0, ranks.make_query(rank, 2))
        return ranks.exchanges[rank].scatter(0, torch.zeros(2, 6, 4) if rank == 0 else None)

    outputs = ranks.run_everywhere(attend)
    assert all(output.is_contiguous() for output in outputs)
    assert len({output.data_ptr() for output in outputs}) == 3


@pytest.mark.parametrize("owner_rank", range(3))
def test_what_an_owner_chose_is_shared_with_all(ranks, owner_rank):
    ranks.prepare(2)
    choices = [torch.full((2, 2), rank, dtype=torch.int32) for rank in range(3)]
    choices[owner_rank].copy_(torch.tensor([[11, 12], [13, 14]]))

    assert ranks.run_everywhere(lambda rank: ranks.exchanges[rank].share(owner_rank, choices[rank])) == [None] * 3
    assert [mine.tolist() for mine in choices] == [[[11, 12], [13, 14]]] * 3


def test_choices_may_be_rows_of_a_longer_buffer(ranks):
    ranks.prepare(2)
    buffers = [torch.full((8, 2), rank, dtype=torch.int32) for rank in range(3)]
    ranks.run_everywhere(lambda rank: ranks.exchanges[rank].share(1, buffers[rank][:2]))

    assert [buffer[:3, 0].tolist() for buffer in buffers] == [[1, 1, 0], [1, 1, 1], [1, 1, 2]]


def test_an_exchange_takes_as_many_rows_as_its_memory(ranks):
    assert [exchange.max_rows for exchange in ranks.exchanges] == [8] * 3


def test_choices_and_attentions_follow_each_other_in_one_step(ranks):
    ranks.prepare(2)

    def run(rank):
        found = []
        for number in range(6):
            choices = torch.full((2, 2), number if rank == number % 3 else -1, dtype=torch.int32)
            ranks.exchanges[rank].share(number % 3, choices)
            ranks.attend(rank, number % 3, 2, number)
            found.append(choices.unique().tolist())
        return found

    assert ranks.run_everywhere(run) == [[[number] for number in range(6)]] * 3
