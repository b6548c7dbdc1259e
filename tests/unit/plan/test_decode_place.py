import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.plan import StageShape
from vllm_kvpp.plan.decode_place import DecodeCosts, chooses_owner
from vllm_kvpp.selection import BlockRuns, ExchangeTraits, LinkTraits, QueryShape

# 8 layers of 1,000 bytes a block. Three quarters of 16 heads are other ranks'; one takes 24 bytes a row.
STAGE = StageShape(num_blocks=1000, num_layers=8, num_components=8, page_size_bytes=8_000)
QUERIES = QueryShape(num_heads=16, group_size=4, query_width=7, output_width=5, element_bytes=2)
NOTHING = BlockRuns()
TEN_BLOCKS = BlockRuns(((5, 15),))
FOUR_BLOCKS = BlockRuns(((5, 9),))


def costs(*, layer_bytes=0, head_token_bytes=0.0, call_bytes=0, link_layer_bytes=0):
    return DecodeCosts(
        STAGE,
        num_attentions=8,
        queries=QUERIES,
        link=LinkTraits(call_bytes, layer_bytes=link_layer_bytes),
        exchange=ExchangeTraits(layer_bytes, head_token_bytes),
    )


def chooses(costs, mode="auto", *, num_rows=1, num_tokens=150, active=TEN_BLOCKS, others=NOTHING, transfer="auto"):
    return chooses_owner(
        mode,
        costs,
        num_rows=num_rows,
        num_attended_tokens=num_tokens,
        active_blocks=active,
        other_blocks=others,
        transfer=transfer,
    )


def test_attending_at_the_owner_costs_the_other_ranks_heads_in_every_attention():
    # Two rows of twelve heads of 24 bytes, in eight attentions.
    assert costs().at_owner(2, 300, NOTHING, "auto") == 8 * 2 * 12 * 24


def test_attending_at_the_owner_costs_a_price_for_each_attention_and_the_wait_for_the_owner():
    found = costs(layer_bytes=500, head_token_bytes=0.25).at_owner(2, 300, NOTHING, "auto")

    assert found == 8 * (2 * 12 * 24 + 500 + 300 * 12 * 0.25)


def test_beside_decodes_the_history_of_the_others_is_paid_for():
    alone = costs().at_owner(2, 300, NOTHING, "auto")

    assert costs().at_owner(2, 300, FOUR_BLOCKS, "auto") == alone + 4 * 8_000


def test_moving_history_costs_its_bytes_its_calls_and_a_price_for_each_layer():
    found = costs(call_bytes=30, link_layer_bytes=7).by_transfer(TEN_BLOCKS, "auto")

    assert found == 10 * 8_000 + 8 * (30 + 7)


def test_where_there_is_no_history_left_nothing_is_moved():
    assert costs(call_bytes=30, link_layer_bytes=7).by_transfer(NOTHING, "full") == 0


def test_whole_bundles_cost_what_all_blocks_do():
    assert costs().by_transfer(TEN_BLOCKS, "full") == 1000 * 8_000


# One row at the owner takes 8 * 12 * 24 = 2,304 bytes, and ten blocks take 80,000: 77,696 more, 9,712 in a layer.
@pytest.mark.parametrize(("layer_bytes", "is_at_owner"), [(0, True), (9_711, True), (9_712, True), (9_713, False)])
def test_auto_attends_at_the_owner_up_to_where_both_cost_the_same(layer_bytes, is_at_owner):
    assert chooses(costs(layer_bytes=layer_bytes)) is is_at_owner


@pytest.mark.parametrize(("num_rows", "is_at_owner"), [(34, True), (35, False)])
def test_auto_moves_the_history_that_many_rows_share(num_rows, is_at_owner):
    assert chooses(costs(), num_rows=num_rows) is is_at_owner


# The wait for the owner is 12 heads and 8 attentions: 96 bytes a token at one byte each.
@pytest.mark.parametrize(("num_tokens", "is_at_owner"), [(809, True), (810, False)])
def test_auto_moves_history_that_takes_the_owner_too_long(num_tokens, is_at_owner):
    assert chooses(costs(head_token_bytes=1.0), num_tokens=num_tokens) is is_at_owner


def test_auto_compares_with_what_the_mode_of_transfer_would_move():
    dear = costs(layer_bytes=100_000)

    assert not chooses(dear, transfer="active")
    assert chooses(dear, transfer="full")


def test_beside_decodes_auto_compares_what_the_others_move_on_top():
    # Of the ten blocks four have to move anyway: six are saved, 48,000 bytes.
    saved = (48_000 - 2_304) // 8

    assert chooses(costs(layer_bytes=saved), others=FOUR_BLOCKS)
    assert not chooses(costs(layer_bytes=saved + 1), others=FOUR_BLOCKS)


@pytest.mark.parametrize("layer_bytes", [0, 10**9])
def test_owner_and_transfer_say_where_whatever_it_costs(layer_bytes):
    assert chooses(costs(layer_bytes=layer_bytes), "owner")
    assert not chooses(costs(layer_bytes=layer_bytes), "transfer")


counts = st.integers(0, 10**6)


@given(st.integers(1, 999), st.integers(1, 999), st.integers(1, 64), counts, counts, counts)
def test_a_longer_history_never_makes_the_owner_dearer_where_it_attends_at_no_cost(
    num_blocks, num_more, num_rows, layer_bytes, call_bytes, link_layer_bytes
):
    found = costs(layer_bytes=layer_bytes, call_bytes=call_bytes, link_layer_bytes=link_layer_bytes)
    longer = min(num_blocks + num_more, 1000)
    is_at_owner, is_longer_at_owner = (
        chooses(found, num_rows=num_rows, num_tokens=16 * length, active=BlockRuns(((0, length),)))
        for length in (num_blocks, longer)
    )

    assert is_longer_at_owner or not is_at_owner


@given(st.integers(1, 64), st.integers(1, 10**6), st.floats(0, 1000), counts)
def test_more_rows_and_tokens_never_make_the_owner_cheaper(num_rows, num_tokens, head_token_bytes, layer_bytes):
    found = costs(layer_bytes=layer_bytes, head_token_bytes=head_token_bytes)
    cost = found.at_owner(num_rows, num_tokens, NOTHING, "auto")

    assert found.at_owner(num_rows + 1, num_tokens, NOTHING, "auto") > cost
    assert found.at_owner(num_rows, num_tokens + 1, NOTHING, "auto") >= cost


@given(
    st.sets(st.integers(0, 999), min_size=1), st.integers(1, 64), counts, counts, st.sampled_from(["full", "active"])
)
def test_auto_never_chooses_what_is_estimated_dearer(ids, num_rows, layer_bytes, call_bytes, transfer):
    found, blocks = costs(layer_bytes=layer_bytes, call_bytes=call_bytes), BlockRuns.of(ids)
    at_owner = found.at_owner(num_rows, 100, NOTHING, transfer)
    moved = found.by_transfer(blocks, transfer)
    is_at_owner = chooses(found, num_rows=num_rows, num_tokens=100, active=blocks, transfer=transfer)

    assert (at_owner if is_at_owner else moved) == min(at_owner, moved)
