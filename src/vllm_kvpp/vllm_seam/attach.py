"""The three places where a forward meets KVPP: around the step, before the model, before each layer's cache."""

from collections.abc import Mapping
from functools import wraps
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvpp.runtime.history import Step
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.vllm_seam.wait_points import attach_waits


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

    Touches: `execute_model`, `get_model`. Because: see `symbols.py`. Checked by: `check_seam`, and at the end of each
    step by `LayerTransfers`.

    Raises:
        KVPPSeamError: a target layer has a cache with no place to wait before it.
    """
    model = model_runner.get_model()
    for layer in target_layers:
        attach_waits(layer.names, layers, model, transfers.before_layer)
    model.register_forward_pre_hook(lambda _model, _inputs: transfers.start_forward())
    _enclose_steps(model_runner, transfers)


def _enclose_steps(model_runner: Any, transfers: LayerTransfers) -> None:
    original = model_runner.execute_model

    @wraps(original)
    def execute_model(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        # Runner V2 sends its dummy runs through here, V1 does not. They compute no request, so they are no step.
        if kwargs.get("dummy_run", False):
            return original(scheduler_output, *args, **kwargs)
        with transfers.step(describe_step(scheduler_output)):
            return original(scheduler_output, *args, **kwargs)

    model_runner.execute_model = execute_model
