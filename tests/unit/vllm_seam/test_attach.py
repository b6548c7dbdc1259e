from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_kvpp.errors import KVPPOrderError, KVPPSeamError
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.vllm_seam.attach import attach, describe_step


def new_request(request_id, num_computed_tokens):
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=([1],),
        num_computed_tokens=num_computed_tokens,
        lora_request=None,
    )


def scheduler_output(*, new=None, running=None, resumed=None, scheduled=None):
    """Requests with their computed tokens; each gets one token scheduled, unless `scheduled` says otherwise."""
    new, resumed = new or {}, resumed or {}
    cached = (running or {}) | resumed
    scheduled = dict.fromkeys(new | cached, 1) if scheduled is None else scheduled
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new_request(name, count) for name, count in new.items()]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(cached),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(cached),
        num_computed_tokens=list(cached.values()),
        num_output_tokens=[0] * len(cached),
    )
    output.num_scheduled_tokens = scheduled
    output.total_num_scheduled_tokens = sum(scheduled.values())
    return output


def computed_tokens(output):
    return dict(describe_step(output).num_computed_tokens)


def test_a_new_request_without_a_prefix_hit_has_no_history():
    assert computed_tokens(scheduler_output(new={"a": 0})) == {"a": 0}


def test_a_new_request_with_a_prefix_hit_has_history():
    assert computed_tokens(scheduler_output(new={"a": 64})) == {"a": 64}


def test_a_running_request_has_the_history_that_the_scheduler_counts():
    assert computed_tokens(scheduler_output(running={"a": 17, "b": 5})) == {"a": 17, "b": 5}


def test_a_resumed_request_without_computed_tokens_has_no_history():
    assert not describe_step(scheduler_output(resumed={"a": 0})).has_history


def test_a_resumed_request_with_a_prefix_hit_has_history():
    assert describe_step(scheduler_output(resumed={"a": 32})).has_history


def test_new_and_running_requests_of_one_batch_are_described_together():
    assert computed_tokens(scheduler_output(new={"a": 0}, running={"b": 9})) == {"a": 0, "b": 9}


def test_a_request_without_scheduled_tokens_takes_no_part():
    output = scheduler_output(new={"a": 0}, running={"b": 9, "c": 4}, scheduled={"a": 3, "c": 0})

    assert computed_tokens(output) == {"a": 0}


def test_an_empty_step_has_no_history():
    assert not describe_step(SchedulerOutput.make_empty()).has_history


class FakeLayer:
    """A layer as vLLM's, which writes down when its hook runs."""

    def __init__(self, name, log):
        self.name = name
        self.log = log

    def prepare_kv_cache_update(self, attn_metadata):
        self.log.append(f"prepare {self.name} with {attn_metadata}")


class FakeRunner:
    """A runner whose model reaches its layers in order."""

    def __init__(self, layers):
        self.log = []
        self.layers = {name: FakeLayer(name, self.log) for name in layers}
        self.model = torch.nn.Identity()

    def get_model(self):
        return self.model

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        self.log.append(f"execute with {intermediate_tensors}" + dummy_run * ", dummy run")
        self.model(torch.zeros(1))
        for layer in self.layers.values():
            layer.prepare_kv_cache_update("metadata")
        return "output"


class LoggedTransport:
    """Writes starts and waits into the log of the runner, by owner rank."""

    def __init__(self, log):
        self.log = log

    def start(self, memory):
        self.log.append(f"start {memory.owner_rank}")
        return SimpleNamespace(num_bytes=1, wait=lambda: self.log.append(f"wait {memory.owner_rank}"))


def attach_to(names=("layers.0.attn", "layers.1.attn"), *, without_hook=()):
    """A runner that is attached to; the owner rank of each layer is its number."""
    return attach_with_transfers(names, without_hook=without_hook)[0]


def attach_with_transfers(names=("layers.0.attn", "layers.1.attn"), *, without_hook=()):
    """The same with its transfers."""
    runner = FakeRunner(names)
    for name in without_hook:
        runner.layers[name] = SimpleNamespace()
    whole = torch.zeros(1, dtype=torch.uint8)
    layers = tuple(TargetLayer((name,), BundleMemory(number, whole, (whole,))) for number, name in enumerate(names))
    transfers = LayerTransfers(layers, LoggedTransport(runner.log), "under test")
    attach(transfers, layers, runner.layers, runner)
    return runner, transfers


DECODE = scheduler_output(running={"a": 17})


def test_each_layer_waits_before_its_own_hook_runs():
    runner = attach_to()
    runner.execute_model(DECODE)

    assert runner.log == [
        "execute with None",
        "start 0",
        "wait 0",
        "start 1",
        "prepare layers.0.attn with metadata",
        "wait 1",
        "prepare layers.1.attn with metadata",
    ]


def test_without_history_the_runner_runs_as_if_nothing_were_attached():
    runner = attach_to()
    runner.execute_model(scheduler_output(new={"a": 0}))

    assert runner.log == [
        "execute with None",
        "prepare layers.0.attn with metadata",
        "prepare layers.1.attn with metadata",
    ]


def test_a_dummy_run_past_execute_model_moves_nothing():
    runner = attach_to()
    runner.model(torch.zeros(1))
    runner.layers["layers.0.attn"].prepare_kv_cache_update(None)

    assert runner.log == ["prepare layers.0.attn with None"]


def test_a_dummy_run_through_execute_model_moves_nothing_and_is_no_step():
    runner, transfers = attach_with_transfers()
    runner.execute_model(DECODE, dummy_run=True)

    assert runner.log == [
        "execute with None, dummy run",
        "prepare layers.0.attn with metadata",
        "prepare layers.1.attn with metadata",
    ]
    assert transfers.counters.steps == 0


def test_a_step_that_says_it_is_no_dummy_run_moves_every_layer():
    runner = attach_to()
    runner.execute_model(DECODE, dummy_run=False)

    assert [line for line in runner.log if line.startswith("start")] == ["start 0", "start 1"]


@pytest.mark.parametrize("output", [DECODE, scheduler_output(new={"a": 0})])
def test_execute_model_takes_and_returns_what_it_did(output):
    runner = attach_to()

    assert runner.execute_model(output, intermediate_tensors="tensors of the stage before") == "output"
    assert runner.log[0] == "execute with tensors of the stage before"


def test_execute_model_takes_the_scheduler_output_by_name():
    assert attach_to().execute_model(scheduler_output=DECODE) == "output"


def test_only_this_runner_and_these_layers_change():
    runner = attach_to()
    other = FakeRunner(["layers.0.attn"])

    assert "execute_model" in vars(runner)
    assert "execute_model" not in vars(other)
    assert "prepare_kv_cache_update" not in vars(other.layers["layers.0.attn"])


def test_the_hooks_keep_their_names():
    runner = attach_to()

    assert runner.execute_model.__name__ == "execute_model"
    assert runner.layers["layers.0.attn"].prepare_kv_cache_update.__name__ == "prepare_kv_cache_update"


def test_layers_without_a_hook_are_refused_by_name():
    with pytest.raises(KVPPSeamError, match=r"no place to wait before layers\.1\.attn: SimpleNamespace has no prepare"):
        attach_to(without_hook=["layers.1.attn"])


def test_a_step_that_passes_a_hook_by_fails():
    runner = attach_to()
    runner.layers["layers.1.attn"].prepare_kv_cache_update = lambda attn_metadata: None

    with pytest.raises(KVPPOrderError, match=r"layers\.1\.attn did not wait for its cache"):
        runner.execute_model(DECODE)
