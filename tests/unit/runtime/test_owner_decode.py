import pytest
import torch

from vllm_kvpp.errors import KVPPOrderError, KVPPTransferError
from vllm_kvpp.runtime.counters import TransferCounters
from vllm_kvpp.runtime.history import DecodeRows, Step, StepRequest
from vllm_kvpp.selection import BlockRuns, ExchangeTraits

TWO_DECODES = Step(BlockRuns.of([1, 2]), (StepRequest(1, 5, 1, [1, 3]), StepRequest(1, 9, 1, [2, 4])))
TWO_ROWS = DecodeRows(2, 2)
WITH_PREFILL = Step(BlockRuns.of([1, 2]), (StepRequest(1, 5, 1, [1, 3]), StepRequest(6, 9, 1, [2, 4])))
ONE_ROW = DecodeRows(1, 1)


def query(num_rows=2):
    """This rank's queries in two parts, as vLLM has them."""
    return torch.ones(num_rows, 2, 4), torch.ones(num_rows, 2, 1)


def attend_all(queries):
    return queries[..., :4]


def begin(decode, step=TWO_DECODES, rows=TWO_ROWS, counters=None):
    return decode.begin(step, rows, "auto", counters or TransferCounters())


def test_between_steps_nothing_attends_at_the_owner(make_decode):
    decode, _ = make_decode()

    assert not decode.is_on


def test_a_step_of_decodes_attends_at_the_owners_and_leaves_nothing_to_move(make_decode):
    decode, exchange = make_decode()
    share = begin(decode)

    assert decode.is_on
    assert (share.num_rows, share.other_blocks) == (2, BlockRuns())
    assert exchange.log == ["prepare 2"]


def test_a_mixed_step_leaves_the_blocks_of_the_other_requests(make_decode):
    decode, _ = make_decode()

    assert list(begin(decode, WITH_PREFILL, ONE_ROW).other_blocks) == [2]


@pytest.mark.parametrize(
    "rows", [None, DecodeRows(0, 0), DecodeRows(1, 1), DecodeRows(2, 4)], ids=["unknown", "none", "open", "others"]
)
def test_rows_that_are_not_known_attend_everywhere(make_decode, rows):
    decode, exchange = make_decode()

    assert begin(decode, rows=rows) is None
    assert not decode.is_on
    assert exchange.log == []


@pytest.mark.parametrize(("max_rows", "is_on"), [(1, False), (2, True)])
def test_more_rows_than_the_exchange_takes_attend_everywhere(make_decode, max_rows, is_on):
    decode, _ = make_decode(max_rows=max_rows)
    begin(decode)

    assert decode.is_on is is_on


def test_too_many_rows_are_warned_of_once(make_decode):
    warnings = []
    decode, _ = make_decode(max_rows=1, warn=warnings.append)
    begin(decode)
    begin(decode)

    assert [warning[:53] for warning in warnings] == ["A step decodes 2 rows, but only 1 have room to attend"]


def test_too_many_rows_are_not_warned_of_where_nothing_is_to_attend_at_the_owner(make_decode):
    warnings = []
    decode, _ = make_decode(max_rows=1, mode="transfer", warn=warnings.append)
    begin(decode)

    assert warnings == []


@pytest.mark.parametrize(("step", "rows", "is_on"), [(WITH_PREFILL, ONE_ROW, False), (TWO_DECODES, TWO_ROWS, True)])
def test_with_indexers_a_batch_attends_at_the_owners_as_a_whole_or_not_at_all(make_decode, step, rows, is_on):
    decode, _ = make_decode(num_choices=16)
    begin(decode, step, rows)

    assert decode.is_on is is_on


@pytest.mark.parametrize(("layer_bytes", "is_on"), [(0, True), (10**9, False)])
def test_auto_attends_at_the_owners_where_that_costs_less(make_decode, layer_bytes, is_on):
    decode, _ = make_decode(mode="auto", traits=ExchangeTraits(layer_bytes))
    begin(decode)

    assert decode.is_on is is_on


def test_transfer_never_attends_at_the_owners(make_decode):
    decode, _ = make_decode(mode="transfer")

    assert begin(decode) is None


def test_the_mode_may_change_between_steps(make_decode):
    decode, _ = make_decode(mode="transfer")
    decode.mode = "owner"

    assert begin(decode) is not None


def test_an_owner_attends_all_heads_and_hands_the_outputs_back(make_decode):
    decode, exchange = make_decode(rank=0)
    begin(decode)
    attended = []
    output = decode.attend("layers.0.attn", query(), lambda queries: attended.append(queries) or queries[..., :4])

    assert [queries.shape for queries in attended] == [(2, 6, 5)]
    assert exchange.output.shape == (2, 6, 4)
    assert torch.equal(output, torch.full((2, 2, 4), 7.0))
    assert exchange.log == ["prepare 2", "gather 0", "scatter 0"]


def test_another_rank_sends_its_queries_and_attends_nothing(make_decode):
    decode, exchange = make_decode(rank=2)
    begin(decode)
    output = decode.attend("layers.0.attn", query(), lambda queries: pytest.fail("attended where the owner has to"))

    assert exchange.output is None
    assert output.shape == (2, 2, 4)


def test_an_owner_lets_queries_arrive_while_it_writes(make_decode):
    decode, exchange = make_decode(rank=0)
    begin(decode)
    for number in range(3):
        decode.before_write(f"layers.{number}.attn")
        decode.attend(f"layers.{number}.attn", query(), attend_all)

    assert exchange.log[1:] == [
        *("begin_gather", "gather 0", "scatter 0"),
        *("gather 1", "scatter 1"),
        *("begin_gather", "gather 0", "scatter 0"),
    ]


def test_between_steps_and_out_of_order_no_query_is_let_in(make_decode):
    decode, exchange = make_decode(rank=0)
    decode.before_write("layers.0.attn")
    begin(decode)
    decode.before_write("layers.2.attn")

    assert exchange.log == ["prepare 2"]


def test_beside_prompts_no_query_is_let_in_before_the_owner_has_its_own(make_decode):
    decode, exchange = make_decode(rank=0)
    begin(decode, WITH_PREFILL, ONE_ROW)
    decode.before_write("layers.0.attn")

    assert exchange.log == ["prepare 1"]


def test_ranks_that_a_failed_step_left_apart_are_an_error_of_the_next(make_decode):
    decode, exchange = make_decode(rank=0)
    exchange.failures["prepare"] = failure = RuntimeError("the gather of a step that failed is still under way")
    with pytest.raises(KVPPTransferError, match=r"^Preparing the exchange of decode queries failed in") as caught:
        begin(decode)

    assert caught.value.__cause__ is failure


def test_a_rank_that_is_gone_as_an_owner_writes_is_an_error_that_names_the_layer(make_decode):
    decode, exchange = make_decode(rank=0)
    begin(decode)
    exchange.failures["begin_gather"] = failure = RuntimeError("Connection closed by peer")
    with pytest.raises(KVPPTransferError) as caught:
        decode.before_write("layers.0.attn")

    assert str(caught.value).startswith(
        "Beginning to gather the decode queries of layers.0.attn failed in the KVPP group of "
    )
    assert caught.value.__cause__ is failure


def test_each_attention_goes_to_its_own_owner(make_decode):
    decode, exchange = make_decode()
    begin(decode)
    for number in range(3):
        decode.attend(f"layers.{number}.attn", query(), attend_all)

    assert exchange.log[1:] == ["gather 0", "scatter 0", "gather 1", "scatter 1", "gather 0", "scatter 0"]


@pytest.mark.parametrize(("rank", "num_heads"), [(0, 4), (1, 2)], ids=["owner", "other"])
def test_what_an_attention_sends_and_receives_is_counted(make_decode, rank, num_heads):
    decode, _ = make_decode(rank=rank)
    counters = TransferCounters()
    begin(decode, counters=counters)
    decode.attend("layers.0.attn", query(), attend_all)

    assert (counters.steps_at_owner, counters.exchanges, counters.choice_bytes) == (1, 1, 0)
    # Rows, heads, width, bytes of an element.
    assert counters.query_bytes == 2 * num_heads * 5 * 2
    assert counters.output_bytes == 2 * num_heads * 4 * 2


@pytest.mark.parametrize(("step", "rows", "left"), [(TWO_DECODES, TWO_ROWS, [1]), (WITH_PREFILL, ONE_ROW, [])])
def test_a_rank_leaves_the_caches_of_others_as_they_are_where_all_requests_decode(make_decode, step, rows, left):
    decode, _ = make_decode(rank=0)
    begin(decode, step, rows)

    # Of the three layers the second is another rank's.
    assert [number for number in range(3) if decode.leaves_cache_as_it_is(f"layers.{number}.attn")] == left


def test_between_steps_a_rank_writes_every_cache(make_decode):
    decode, _ = make_decode(rank=2)
    begin(decode)
    decode.reset()

    assert not decode.leaves_cache_as_it_is("layers.0.attn")


def test_a_mixed_step_behind_one_of_decodes_writes_every_cache(make_decode):
    decode, _ = make_decode(rank=2)
    begin(decode)
    begin(decode, WITH_PREFILL, ONE_ROW)

    assert not decode.leaves_cache_as_it_is("layers.0.attn")


def test_an_attention_out_of_order_is_refused_naming_it_and_the_expected_one(make_decode):
    decode, _ = make_decode()
    begin(decode)

    with pytest.raises(KVPPOrderError, match=r"^layers\.1\.attn was reached out of order .* expected layers\.0\.attn"):
        decode.attend("layers.1.attn", query(), attend_all)


def test_an_attention_behind_the_last_is_refused(make_decode):
    decode, _ = make_decode()
    begin(decode)
    for number in range(3):
        decode.attend(f"layers.{number}.attn", query(), attend_all)

    with pytest.raises(KVPPOrderError, match="KVPP expected no further layer"):
        decode.attend("layers.0.attn", query(), attend_all)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_other_rows_than_the_batch_named_are_refused_before_anything_is_exchanged(make_decode, num_rows):
    decode, exchange = make_decode()
    begin(decode)

    message = rf"^layers\.0\.attn attends {num_rows} decode rows, but the batch's metadata named 2: the history"
    with pytest.raises(KVPPOrderError, match=message):
        decode.attend("layers.0.attn", query(num_rows), attend_all)
    assert exchange.log == ["prepare 2"]


def test_an_attention_that_was_passed_by_is_noticed_at_the_end(make_decode):
    decode, _ = make_decode()
    begin(decode)
    decode.attend("layers.0.attn", query(), attend_all)

    with pytest.raises(KVPPOrderError, match=r"^layers\.1\.attn did not attend to its owner.*--enforce-eager"):
        decode.check_all_attended()


def test_at_the_end_of_a_step_that_attended_everywhere_nothing_is_missing(make_decode):
    decode, _ = make_decode()
    begin(decode, rows=None)
    decode.check_all_attended()


def test_after_a_reset_the_next_step_begins_with_the_first_attention(make_decode):
    decode, exchange = make_decode()
    begin(decode)
    decode.attend("layers.0.attn", query(), attend_all)
    decode.reset()
    assert not decode.is_on
    begin(decode)
    decode.attend("layers.0.attn", query(), attend_all)

    assert exchange.log == ["prepare 2", "gather 0", "scatter 0"] * 2


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), TimeoutError("the kernel"), ZeroDivisionError()])
def test_what_the_kernel_raises_is_not_taken_for_a_lost_rank(make_decode, error):
    decode, _ = make_decode()
    begin(decode)

    def fail(queries):
        raise error

    with pytest.raises(type(error)) as caught:
        decode.attend("layers.0.attn", query(), fail)
    assert caught.value is error


@pytest.mark.parametrize("call", ["gather", "scatter"])
@pytest.mark.parametrize("failure", [TimeoutError("nothing within 5 s"), RuntimeError("group rank 1 is gone")])
def test_a_failed_exchange_names_layer_owner_group_cause_and_remedy(make_decode, call, failure):
    decode, exchange = make_decode()
    begin(decode)
    exchange.failures[call] = failure
    with pytest.raises(KVPPTransferError) as caught:
        decode.attend("layers.0.attn", query(), attend_all)

    message = str(caught.value)
    assert message.startswith("The exchange of decode queries with the owner of layers.0.attn, rank 0, failed in the ")
    assert f"KVPP group of ranks [2, 3, 4]: {failure}. A rank of the group is gone or stuck" in message
    assert message.endswith("raise kvpp.transfer_timeout_seconds.")
    assert caught.value.__cause__ is failure
