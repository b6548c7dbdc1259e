import pytest

from vllm_kvpp.errors import KVPPOrderError
from vllm_kvpp.runtime.history import Step
from vllm_kvpp.selection import BlockRuns, Way
from vllm_kvpp.transport.recording import RecordedTransfer

FIRST_PREFILL = Step()
DECODE = Step(BlockRuns.of([1]))


def test_without_history_nothing_is_moved(make_stage):
    stage = make_stage()
    stage.run_step(FIRST_PREFILL)

    assert stage.calls == []


def test_outside_a_step_nothing_is_moved(make_stage):
    stage = make_stage()
    stage.run_forward()

    assert stage.calls == []


def test_after_a_step_with_history_dummy_runs_move_nothing(make_stage):
    stage = make_stage()
    stage.run_step(DECODE)
    stage.transport.log.clear()
    stage.run_forward()

    assert stage.calls == []


def test_without_history_layers_may_run_in_any_order(make_stage):
    stage = make_stage()
    stage.run_step(FIRST_PREFILL, "layers.2.attn", "layers.0.attn")

    assert stage.calls == []


def test_with_history_each_layer_waits_and_then_starts_the_next(make_stage):
    stage = make_stage(4)
    stage.run_step(DECODE)

    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1", "start 2", "wait 2", "start 3", "wait 3"]


def test_the_first_transfer_starts_before_the_first_layer_is_reached(make_stage):
    stage = make_stage(1)
    with stage.transfers.step(DECODE):
        stage.transfers.start_forward()
        calls_before_the_layer = stage.calls
        stage.transfers.before_layer("layers.0.attn")

    assert calls_before_the_layer == ["start 0"]


def test_no_transfer_starts_before_the_model_runs(make_stage):
    stage = make_stage(1)
    with stage.transfers.step(DECODE):
        calls_before_the_model = stage.calls
        stage.run_forward()

    assert calls_before_the_model == []


def test_no_layer_goes_on_before_its_own_transfer_has_been_waited_for(make_stage):
    stage = make_stage()
    with stage.transfers.step(DECODE):
        stage.transfers.start_forward()
        for number, layer in enumerate(stage.layers):
            stage.transfers.before_layer(layer.names[0])
            assert f"wait {number}" in stage.calls


@pytest.mark.parametrize("names", [("layers.1.indexer", "layers.1.attn"), ("layers.1.attn", "layers.1.indexer")])
def test_without_an_entry_whichever_cache_of_a_layer_comes_first_waits_for_both(make_stage, names):
    stage = make_stage(2)
    stage.run_step(DECODE, "layers.0.attn", *names)

    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1"]


def test_a_layer_entered_by_its_entry_waits_once_for_all_its_caches(make_stage):
    stage = make_stage(2, entry="layers.1.indexer")
    stage.run_step(DECODE, "layers.0.attn", "layers.1.indexer", "layers.1.attn")

    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1"]


def test_a_layer_whose_entry_was_passed_by_is_refused_naming_both_caches(make_stage):
    stage = make_stage(entry="layers.1.indexer")

    with pytest.raises(
        KVPPOrderError, match=r"^layers\.1\.attn was reached before layers\.1\.indexer of the same layer"
    ):
        stage.run_step(DECODE, "layers.0.attn", "layers.1.attn")


def test_a_stage_without_layers_moves_nothing(make_stage):
    stage = make_stage(0)
    stage.run_step(DECODE)

    assert stage.calls == []


def test_a_stage_of_one_layer_has_nothing_to_prefetch(make_stage):
    stage = make_stage(1)
    stage.run_step(DECODE)

    assert stage.calls == ["start 0", "wait 0"]


def test_every_step_begins_with_the_first_layer(make_stage):
    stage = make_stage(2)
    for step in (DECODE, FIRST_PREFILL, DECODE):
        stage.run_step(step)

    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1"] * 2


def test_a_layer_reached_before_its_turn_is_refused_naming_it_and_the_expected_one(make_stage):
    stage = make_stage()

    with pytest.raises(KVPPOrderError, match=r"^layers\.2\.attn was reached out of order: .* expected layers\.1\.attn"):
        stage.run_step(DECODE, "layers.0.attn", "layers.2.attn")


def test_a_layer_reached_again_after_its_scratch_buffer_was_handed_on_is_refused(make_stage):
    stage = make_stage()

    with pytest.raises(
        KVPPOrderError, match=r"layers\.0\.attn was reached out of order: KVPP expected layers\.2\.attn"
    ):
        stage.run_step(DECODE, "layers.0.attn", "layers.1.attn", "layers.0.attn")


def test_a_layer_before_the_last_reached_again_at_the_end_is_refused(make_stage):
    stage = make_stage()

    with pytest.raises(KVPPOrderError, match="KVPP expected no further layer"):
        stage.run_step(DECODE, "layers.0.attn", "layers.1.attn", "layers.2.attn", "layers.1.indexer")


def test_a_layer_reached_before_the_forward_began_is_refused(make_stage):
    stage = make_stage()

    with (
        pytest.raises(KVPPOrderError, match=r"^layers\.0\.attn was reached before the model's forward began"),
        stage.transfers.step(DECODE),
    ):
        stage.transfers.before_layer("layers.0.attn")


def test_a_layer_that_did_not_wait_is_refused_at_the_end_of_the_step(make_stage):
    stage = make_stage()

    with pytest.raises(KVPPOrderError, match=r"^layers\.1\.attn \+ layers\.1\.indexer did not wait.*--enforce-eager"):
        stage.run_step(DECODE, "layers.0.attn")


def test_a_model_that_ran_twice_in_one_step_is_refused(make_stage):
    stage = make_stage()

    with stage.transfers.step(DECODE):
        stage.run_forward()
        with pytest.raises(KVPPOrderError, match="The model ran twice in one step"):
            stage.transfers.start_forward()


def test_a_step_with_history_in_which_the_model_did_not_run_is_refused(make_stage):
    stage = make_stage()

    with (
        pytest.raises(KVPPOrderError, match=r"^layers\.0\.attn did not wait for its cache"),
        stage.transfers.step(DECODE),
    ):
        pass


def test_a_step_without_history_in_which_the_model_did_not_run_is_fine(make_stage):
    stage = make_stage()
    with stage.transfers.step(Step()):
        pass

    assert stage.calls == []


def test_a_step_inside_a_step_is_a_bug_of_ours(make_stage):
    stage = make_stage()

    with (
        pytest.raises(AssertionError, match="a step began before the last one had ended"),
        stage.transfers.step(DECODE),
        stage.transfers.step(DECODE),
    ):
        pass


def test_counters_count_steps_transfers_and_bytes(make_stage):
    stage = make_stage(3)
    for step in (FIRST_PREFILL, DECODE, DECODE):
        stage.run_step(step)

    assert stage.transfers.counters.as_dict() == {
        "steps": 3,
        "steps_with_history": 2,
        "steps_with_transfers": 2,
        "steps_at_owner": 0,
        "steps_in_place": 0,
        "transfers": 6,
        # One of two blocks.
        "transferred_bytes": 2 * (4 + 8 + 12),
        "transferred_blocks": 6,
        "calls": 6,
        "exchanges": 0,
        "query_bytes": 0,
        "output_bytes": 0,
        "choice_bytes": 0,
        # A recorded transfer takes three seconds, one of which is waited for.
        "waited_seconds": 6.0,
        "hidden_seconds": 12.0,
    }


def test_the_blocks_of_a_step_are_named_once_before_its_first_transfer(make_stage):
    stage = make_stage(3)
    for block_ids in ([1], [0, 1]):
        stage.run_step(Step(BlockRuns.of(block_ids)))

    assert [selection.blocks.runs for selection in stage.transport.prepared] == [((1, 2),), ((0, 2),)]


@pytest.mark.parametrize(("mode", "way"), [("full", Way.WHOLE), ("active", Way.RUNS), ("auto", Way.RUNS)])
def test_the_mode_says_whether_whole_bundles_move(make_stage, mode, way):
    stage = make_stage(3)
    stage.transfers.transfer = mode
    stage.run_step(DECODE)

    assert [selection.way for selection in stage.transport.prepared] == [way]
    assert stage.transfers.counters.transferred_bytes == (8 + 16 + 24) // (1 if way is Way.WHOLE else 2)


def test_times_that_are_not_known_yet_are_counted_after_a_later_step(make_stage, monkeypatch):
    stage = make_stage(1)
    with monkeypatch.context() as patches:
        patches.setattr(RecordedTransfer, "seconds", lambda transfer: None)
        stage.run_step(DECODE)
    assert stage.transfers.counters.waited_seconds == 0
    stage.run_step(FIRST_PREFILL)

    assert stage.transfers.counters.waited_seconds == 1.0
