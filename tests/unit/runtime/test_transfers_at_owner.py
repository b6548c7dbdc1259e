"""The transfers of steps whose decode rows attend at the owners: what is left of them."""

import pytest
import torch

from vllm_kvpp.errors import KVPPOrderError, KVPPTransferError
from vllm_kvpp.runtime.history import DecodeRows, Step, StepRequest
from vllm_kvpp.runtime.layer_transfers import describe_stage
from vllm_kvpp.selection import BlockRuns

DECODE = Step(BlockRuns.of([0, 1]), (StepRequest(1, 3, 1, [0]), StepRequest(1, 2, 1, [1])))
TWO_ROWS = DecodeRows(2, 2)
MIXED = Step(BlockRuns.of([0, 1]), (StepRequest(1, 3, 1, [0]), StepRequest(5, 2, 1, [1])))
WITH_FIRST_PREFILL = Step(BlockRuns.of([0]), (StepRequest(1, 3, 1, [0]), StepRequest(5, 0, 0, [1])))
ONE_ROW = DecodeRows(1, 1)


@pytest.fixture
def make_both(make_stage, make_decode):
    """A stage of three layers whose decode rows may attend at the owners, its decode and the exchange of that."""

    def make_both(**changes):
        decode, exchange = make_decode(**changes)
        return make_stage(decode=decode), decode, exchange

    return make_both


def run_step(stage, decode, step, rows, *, numbers=(0, 1, 2), waits=True, error=None):
    """Reach layers as a forward does: first the cache, if it `waits`, then the attention; end with `error`."""
    with stage.transfers.step(step):
        stage.transfers.start_forward(rows)
        for number in numbers:
            for name in stage.layers[number].names if waits else ():
                stage.transfers.before_layer(name)
            if decode.is_on:
                parts = torch.ones(rows.num_rows, 2, 4), torch.ones(rows.num_rows, 2, 1)
                decode.attend(f"layers.{number}.attn", parts, lambda queries: queries[..., :4])
        if error is not None:
            raise error


def test_a_step_that_only_decodes_moves_nothing_and_waits_for_nothing(make_both):
    stage, decode, exchange = make_both()
    run_step(stage, decode, DECODE, TWO_ROWS)

    assert stage.calls == []
    assert stage.transport.prepared == []
    assert [call.split()[0] for call in exchange.log] == ["prepare", *["gather", "scatter"] * 3]


def test_beside_decodes_only_the_blocks_of_the_other_requests_move(make_both):
    stage, decode, _ = make_both()
    run_step(stage, decode, MIXED, ONE_ROW)

    assert [list(selection.blocks) for selection in stage.transport.prepared] == [[1]]
    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1", "start 2", "wait 2"]


def test_beside_a_first_prefill_nothing_is_left_to_move(make_both):
    stage, decode, exchange = make_both()
    run_step(stage, decode, WITH_FIRST_PREFILL, ONE_ROW)

    assert stage.calls == []
    assert exchange.log[0] == "prepare 1"


def test_without_known_rows_all_blocks_move(make_both):
    stage, decode, exchange = make_both()
    run_step(stage, decode, DECODE, None)

    assert [list(selection.blocks) for selection in stage.transport.prepared] == [[0, 1]]
    assert exchange.log == []


def test_rows_of_a_step_without_history_attend_everywhere(make_both):
    stage, decode, exchange = make_both()
    run_step(stage, decode, Step(BlockRuns(), (StepRequest(1, 0, 0, [0]),)), ONE_ROW)

    assert (stage.calls, exchange.log) == ([], [])


def test_without_a_decode_at_owners_known_rows_change_nothing(make_stage):
    stage = make_stage()
    with stage.transfers.step(DECODE):
        stage.run_forward(rows=TWO_ROWS)

    assert [list(selection.blocks) for selection in stage.transport.prepared] == [[0, 1]]


def test_steps_are_counted_by_what_they_did(make_both):
    stage, decode, _ = make_both()
    for step, rows in ((DECODE, TWO_ROWS), (MIXED, ONE_ROW), (DECODE, None), (Step(), None)):
        run_step(stage, decode, step, rows)
    counters = stage.transfers.counters

    assert (counters.steps, counters.steps_with_history) == (4, 3)
    assert (counters.steps_with_transfers, counters.steps_at_owner) == (2, 2)
    assert (counters.exchanges, counters.transfers) == (6, 6)


def test_a_step_that_decodes_waits_for_no_layer_but_each_has_to_attend(make_both):
    stage, decode, _ = make_both()

    with pytest.raises(KVPPOrderError, match=r"^layers\.1\.attn did not attend to its owner's memory in this step"):
        run_step(stage, decode, DECODE, TWO_ROWS, numbers=[0])


def test_in_a_mixed_step_each_layer_has_to_wait_too(make_both):
    stage, decode, _ = make_both()

    with pytest.raises(KVPPOrderError, match=r"^layers\.0\.attn did not wait for its cache"):
        run_step(stage, decode, MIXED, ONE_ROW, waits=False)


def test_a_step_that_decodes_in_which_the_model_did_not_run_is_refused(make_both):
    stage, _, _ = make_both()

    with pytest.raises(KVPPOrderError, match="did not wait for its cache"), stage.transfers.step(DECODE):
        pass


def test_a_model_that_ran_twice_in_a_step_that_decodes_is_refused(make_both):
    stage, _, _ = make_both(places=())

    with stage.transfers.step(DECODE):
        stage.transfers.start_forward(TWO_ROWS)
        with pytest.raises(KVPPOrderError, match="The model ran twice in one step"):
            stage.transfers.start_forward(TWO_ROWS)


@pytest.mark.parametrize("step", [DECODE, MIXED], ids=["pure", "mixed"])
def test_the_step_after_a_failed_one_starts_anew(make_both, step):
    stage, decode, exchange = make_both()
    rows = TWO_ROWS if step is DECODE else ONE_ROW
    with pytest.raises(ZeroDivisionError):
        run_step(stage, decode, step, rows, numbers=[0, 1], error=ZeroDivisionError())
    assert not decode.is_on
    exchange.log.clear()
    run_step(stage, decode, step, rows)

    assert exchange.log[:2] == [f"prepare {rows.num_rows}", "gather 0"]
    assert len(exchange.log) == 7


def test_a_failed_exchange_ends_the_step_and_leaves_no_transfer_under_way(make_both):
    stage, decode, exchange = make_both()
    exchange.failures["gather"] = TimeoutError("nothing within 5 s")

    with pytest.raises(KVPPTransferError, match="The exchange of decode queries"):
        run_step(stage, decode, MIXED, ONE_ROW)
    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1"]
    assert not decode.is_on


def test_dummy_runs_behind_a_step_that_decodes_attend_everywhere(make_both):
    stage, decode, exchange = make_both()
    run_step(stage, decode, DECODE, TWO_ROWS)
    exchange.log.clear()
    stage.run_forward(rows=TWO_ROWS)

    assert not decode.is_on
    assert exchange.log == []


def test_a_stage_is_described_by_all_its_layers(make_stage):
    shape = describe_stage(make_stage(3).layers)

    # Layer n has two blocks of 4 (n + 1) bytes.
    assert (shape.num_blocks, shape.num_layers, shape.num_components, shape.page_size_bytes) == (2, 3, 3, 4 + 8 + 12)


def test_a_stage_without_layers_holds_nothing():
    assert describe_stage(()).page_size_bytes == describe_stage(()).num_blocks == 0
