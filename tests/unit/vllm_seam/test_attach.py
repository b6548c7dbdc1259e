from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_kvpp.errors import KVPPOrderError, KVPPSeamError
from vllm_kvpp.runtime.history import BlockTables
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.selection import LinkTraits, TransferSeconds
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.vllm_seam.attach import attach, describe_schedule


def new_request(request_id, num_computed_tokens, block_ids=(1, 2, 3, 4)):
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(list(block_ids),),
        num_computed_tokens=num_computed_tokens,
        lora_request=None,
    )


def scheduler_output(*, new=None, running=None, resumed=None, scheduled=None, blocks=None, finished=()):
    """Requests with their computed tokens; each gets one token scheduled, unless `scheduled` says otherwise.

    `blocks` names new blocks of running and resumed requests.
    """
    new, resumed, blocks = new or {}, resumed or {}, blocks or {}
    cached = (running or {}) | resumed
    scheduled = dict.fromkeys(new | cached, 1) if scheduled is None else scheduled
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new_request(name, count) for name, count in new.items()]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(cached),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[(blocks[name],) if name in blocks else None for name in cached],
        num_computed_tokens=list(cached.values()),
        num_output_tokens=[0] * len(cached),
    )
    output.num_scheduled_tokens = scheduled
    output.total_num_scheduled_tokens = sum(scheduled.values())
    output.finished_req_ids = set(finished)
    return output


def described(output):
    """Each request as (name, computed tokens, blocks, whether they replace, tokens to compute)."""
    return [
        (update.request_id, update.num_computed_tokens, update.block_ids, update.replaces_blocks, update.num_tokens)
        for update in describe_schedule(output).requests
    ]


def test_a_new_request_brings_its_first_blocks():
    assert described(scheduler_output(new={"a": 0})) == [("a", 0, [1, 2, 3, 4], True, 1)]


def test_a_new_request_with_a_prefix_hit_brings_its_computed_tokens():
    assert described(scheduler_output(new={"a": 64})) == [("a", 64, [1, 2, 3, 4], True, 1)]


def test_a_running_request_has_the_history_that_the_scheduler_counts_and_blocks_to_append():
    output = scheduler_output(running={"a": 17, "b": 5}, blocks={"b": [7, 9]})

    assert described(output) == [("a", 17, [], False, 1), ("b", 5, [7, 9], False, 1)]


def test_a_resumed_requests_blocks_take_the_place_of_the_old_ones():
    assert described(scheduler_output(resumed={"a": 32}, blocks={"a": [8, 9]})) == [("a", 32, [8, 9], True, 1)]


def test_new_and_running_requests_of_one_batch_are_described_together():
    output = scheduler_output(new={"a": 0}, running={"b": 9})

    assert [update[:2] for update in described(output)] == [("a", 0), ("b", 9)]


def test_each_request_has_the_tokens_that_are_scheduled_of_it_or_none():
    output = scheduler_output(new={"a": 0}, running={"b": 9, "c": 4}, scheduled={"a": 3, "c": 0})

    assert [(update[0], update[4]) for update in described(output)] == [("a", 3), ("b", 0), ("c", 0)]


def test_finished_requests_are_named():
    assert describe_schedule(scheduler_output(finished=["a", "b"])).finished == {"a", "b"}


def test_blocks_of_several_groups_of_caches_are_a_bug_of_ours():
    output = scheduler_output(new={"a": 0})
    output.scheduled_new_reqs[0].block_ids = ([1], [2])

    with pytest.raises(ValueError, match="too many values"):
        describe_schedule(output)


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

    traits = LinkTraits(call_bytes=0)

    def __init__(self, log):
        self.log = log

    def prepare(self, selection):
        self.log.append(f"blocks {list(selection.blocks)}")

    def start(self, memory):
        self.log.append(f"start {memory.owner_rank}")
        return SimpleNamespace(
            num_bytes=1,
            num_calls=1,
            wait=lambda: self.log.append(f"wait {memory.owner_rank}"),
            seconds=lambda: TransferSeconds(0.0, 0.0),
        )


def attach_to(names=("layers.0.attn", "layers.1.attn"), *, without_hook=()):
    """A runner that is attached to; the owner rank of each layer is its number."""
    return attach_with_transfers(names, without_hook=without_hook)[0]


def attach_with_transfers(names=("layers.0.attn", "layers.1.attn"), *, without_hook=()):
    """The same with its transfers."""
    runner = FakeRunner(names)
    for name in without_hook:
        runner.layers[name] = SimpleNamespace()
    whole = torch.zeros(8, dtype=torch.uint8)
    memories = [BundleMemory(number, whole, (whole.view(8, 1),)) for number in range(len(names))]
    layers = tuple(TargetLayer((name,), memory) for name, memory in zip(names, memories, strict=True))
    transfers = LayerTransfers(layers, LoggedTransport(runner.log), "under test")
    attach(transfers, BlockTables(16), layers, runner.layers, runner)
    return runner, transfers


DECODE = scheduler_output(resumed={"a": 17}, blocks={"a": [5, 2, 7]})


def test_each_layer_waits_before_its_own_hook_runs():
    runner = attach_to()
    runner.execute_model(DECODE)

    assert runner.log == [
        "execute with None",
        "blocks [2, 5]",
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


def test_blocks_are_followed_from_step_to_step():
    runner = attach_to()
    runner.execute_model(scheduler_output(new={"a": 0}))
    runner.execute_model(scheduler_output(running={"a": 60}))
    runner.execute_model(scheduler_output(running={"a": 70}, blocks={"a": [6]}))
    runner.execute_model(scheduler_output(new={"a": 1}, finished=["a"]))

    assert [line for line in runner.log if line.startswith("blocks")] == [
        "blocks [1, 2, 3, 4]",
        "blocks [1, 2, 3, 4, 6]",
        "blocks [1]",
    ]


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
