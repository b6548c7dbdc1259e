"""The three places where a forward meets KVPP: around the step, before the model, before each layer's cache."""

from collections.abc import Mapping
from functools import wraps
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvpp.errors import KVPPSeamError
from vllm_kvpp.runtime.history import Step
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer


def describe_step(scheduler_output: SchedulerOutput) -> Step:
    """Translate the scheduler's output; requests without scheduled tokens do not take part."""
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    computed = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return Step({request_id: count for request_id, count in computed.items() if scheduled.get(request_id, 0) > 0})


def attach(
    transfers: LayerTransfers, target_layers: tuple[TargetLayer, ...], layers: Mapping[str, Any], model_runner: Any
) -> None:
    """Attach to this runner, its model and its layers; nothing but these instances changes.

    Touches: `execute_model`, `get_model`, `prepare_kv_cache_update`. Because: see `symbols.py`. Checked by:
    `check_seam`, here for each layer, and at the end of each step by `LayerTransfers`.

    Raises:
        KVPPSeamError: a target layer has no hook before its cache update.
    """
    names = [name for layer in target_layers for name in layer.names]
    without_hook = [name for name in names if not hasattr(layers[name], "prepare_kv_cache_update")]
    if without_hook:
        raise KVPPSeamError(
            f"KVPP has no place to wait in {', '.join(without_hook)}: no prepare_kv_cache_update there."
        )
    for name in names:
        _wait_before_cache_update(layers[name], name, transfers)
    model_runner.get_model().register_forward_pre_hook(lambda _model, _inputs: transfers.start_forward())
    _enclose_steps(model_runner, transfers)


def _wait_before_cache_update(layer: Any, name: str, transfers: LayerTransfers) -> None:
    original = layer.prepare_kv_cache_update

    @wraps(original)
    def prepare_kv_cache_update(attn_metadata: Any) -> None:
        transfers.before_layer(name)
        original(attn_metadata)

    layer.prepare_kv_cache_update = prepare_kv_cache_update


def _enclose_steps(model_runner: Any, transfers: LayerTransfers) -> None:
    original = model_runner.execute_model

    @wraps(original)
    def execute_model(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        with transfers.step(describe_step(scheduler_output)):
            return original(scheduler_output, *args, **kwargs)

    model_runner.execute_model = execute_model
