import pytest

from vllm_kvpp.errors import KVPPOrderError, KVPPTransferError
from vllm_kvpp.runtime.history import Step
from vllm_kvpp.selection import BlockRuns
from vllm_kvpp.transport.recording import RecordingTransport

DECODE = Step(BlockRuns.of([1]))

FAILURES = [TimeoutError("not finished after 5 s"), RuntimeError("Connection closed by peer")]


def fail_in_layer_1(stage):
    """Raise inside the forward, when layer 1 has been reached and the transfer of layer 2 is under way."""
    error = ZeroDivisionError("in the model")
    with pytest.raises(ZeroDivisionError) as caught:
        stage.run_step(DECODE, "layers.0.attn", "layers.1.attn", error=error)
    assert caught.value is error


def test_a_transfer_under_way_is_waited_for_when_the_forward_raises(make_stage):
    stage = make_stage()
    fail_in_layer_1(stage)

    assert stage.calls[-2:] == ["start 2", "wait 2"]


def test_an_error_before_the_model_runs_surfaces_as_it_is(make_stage):
    stage = make_stage()

    with pytest.raises(ZeroDivisionError), stage.transfers.step(DECODE):
        raise ZeroDivisionError


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_in_the_forward_is_not_hidden_by_one_of_its_last_transfer(make_stage, failure):
    stage = make_stage(failures={2: failure})
    fail_in_layer_1(stage)

    assert stage.calls[-1] == "wait 2"


def test_a_disorder_is_not_hidden_by_a_failure_of_its_last_transfer(make_stage):
    stage = make_stage(failures={1: TimeoutError("late")})

    with pytest.raises(KVPPOrderError):
        stage.run_step(DECODE, "layers.0.attn", "layers.2.attn")
    assert stage.calls[-1] == "wait 1"


def test_the_step_after_a_failed_one_starts_anew(make_stage):
    stage = make_stage()
    fail_in_layer_1(stage)
    stage.transport.log.clear()
    stage.run_step(DECODE)

    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1", "start 2", "wait 2"]


def test_dummy_runs_after_a_failed_step_move_nothing(make_stage):
    stage = make_stage()
    fail_in_layer_1(stage)
    stage.transport.log.clear()
    stage.run_forward()

    assert stage.calls == []


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_transfer_names_layer_owner_group_cause_and_remedy(make_stage, failure):
    stage = make_stage(failures={1: failure})
    with pytest.raises(KVPPTransferError) as caught:
        stage.run_step(DECODE)

    message = str(caught.value)
    assert "layers.1.attn + layers.1.indexer from owner rank 1" in message
    assert "the KVPP group of ranks [2, 3]" in message
    assert str(failure) in message
    assert "raise kvpp.transfer_timeout_seconds" in message


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_transfer_keeps_the_error_of_the_backend(make_stage, failure):
    stage = make_stage(failures={0: failure})
    with pytest.raises(KVPPTransferError) as caught:
        stage.run_step(DECODE)

    assert caught.value.__cause__ is failure


def test_after_a_failed_transfer_no_other_is_started_and_it_is_not_waited_for_again(make_stage):
    stage = make_stage(failures={1: TimeoutError("late")})
    with pytest.raises(KVPPTransferError):
        stage.run_step(DECODE)

    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1"]


def test_the_step_after_a_failed_transfer_starts_anew(make_stage):
    stage = make_stage(failures={1: TimeoutError("late")})
    with pytest.raises(KVPPTransferError):
        stage.run_step(DECODE)
    stage.failures.clear()
    stage.transport.log.clear()
    stage.run_step(DECODE)

    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1", "start 2", "wait 2"]


def test_a_transfer_that_cannot_be_started_is_named_like_one_that_failed(make_stage):
    class Broken(RecordingTransport):
        def start(self, memory):
            raise RuntimeError("NCCL error")

    stage = make_stage()
    stage.transfers.transport = Broken()

    message = r"layers\.0\.attn from owner rank 0 failed in the KVPP group of ranks \[2, 3\]: NCCL error"
    with pytest.raises(KVPPTransferError, match=message):
        stage.run_step(DECODE)
    assert stage.transfers.counters.transfers == 0


def test_ranks_that_cannot_meet_before_a_step_are_named_like_a_failed_transfer(make_stage):
    class Broken(RecordingTransport):
        def prepare(self, selection):
            raise RuntimeError("group rank 1 is gone")

    stage = make_stage()
    stage.transfers.transport = Broken()

    with pytest.raises(KVPPTransferError, match=r"layers\.0\.attn from owner rank 0 failed .* group rank 1 is gone"):
        stage.run_step(DECODE)
