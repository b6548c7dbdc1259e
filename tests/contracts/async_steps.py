"""One request under asynchronous scheduling, as the steps reach a worker; asked by `vllm_questions.py`."""

import pickle
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvpp.runtime.history import BlockTables
from vllm_kvpp.vllm_seam.attach import describe_schedule

MODEL = str(Path(__file__).parents[2] / "src/vllm_kvpp/demo/recall")


def schedule_asynchronously() -> list[dict[str, Any]]:
    """Each step of one request under asynchronous scheduling with two draft tokens, as a worker is told of it.

    Steps are scheduled ahead of their results. Then all drafts of one step are rejected, and the request is preempted.
    """
    scheduler = _make_async_scheduler()
    request = _add_request(scheduler, "request", num_prompt_tokens=10)
    outputs = [scheduler.schedule() for _ in range(3)]
    for output in outputs[:2]:
        # One token a step: nothing of the drafts was accepted.
        result = ModelRunnerOutput(
            req_ids=["request"], req_id_to_index={"request": 0}, sampled_token_ids=[[7]], prompt_logprobs_dict={}
        )
        scheduler.update_from_output(output, result)
    outputs.append(scheduler.schedule())
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_computed_tokens == 0
    outputs.append(scheduler.schedule())
    tables = BlockTables(block_size=16)
    return [_describe(output, tables) for output in outputs]


def _describe(output: Any, tables: BlockTables) -> dict[str, Any]:
    update = describe_schedule(output)
    # Workers of one node share a queue that carries the pickled message.
    arrived = describe_schedule(pickle.loads(pickle.dumps(output)))
    step = tables.advance(update)
    return {
        "computed": {request.request_id: request.num_computed_tokens for request in update.requests},
        "active_blocks": list(step.active_blocks),
        "scheduled": dict(output.num_scheduled_tokens),
        "drafts": {name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()},
        "has_history": step.has_history,
        "arrives_equal": arrived == update,
    }


def _make_async_scheduler() -> Any:
    # Looking at the model's class takes vLLM a process of its own, and half a minute.
    registry._run_in_subprocess = lambda function: function()
    model = ModelConfig(model=MODEL, tokenizer=MODEL, dtype="float32", max_model_len=128, enforce_eager=True)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=128, max_model_len=128, is_encoder_decoder=False
        ),
        device_config=DeviceConfig(device="cpu"),
        # The scheduler only reads how many tokens are drafted.
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2),
    )
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = 32
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=32, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return AsyncScheduler(config, caches, StructuredOutputManager(config), block_size=16, hash_block_size=16)


def _add_request(scheduler: Any, name: str, *, num_prompt_tokens: int) -> Any:
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    request = Request(name, list(range(1, num_prompt_tokens + 1)), sampling, None)
    scheduler.add_request(request)
    return request
