"""The three places where a forward meets KVPP: around the step, before the model, before each layer's cache."""

from collections.abc import Mapping
from functools import wraps
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvpp.runtime.history import BlockTables, RequestUpdate, ScheduleUpdate
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.vllm_seam.owner_decode import find_attentions, find_decode_rows
from vllm_kvpp.vllm_seam.wait_points import attach_waits


def describe_schedule(scheduler_output: SchedulerOutput) -> ScheduleUpdate:
    """Translate the scheduler's output; requests without scheduled tokens do not take part in the step."""
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    new = [
        RequestUpdate(
            request.req_id,
            request.num_computed_tokens,
            _take_one_group(request.block_ids),
            replaces_blocks=True,
            num_tokens=scheduled.get(request.req_id, 0),
        )
        for request in scheduler_output.scheduled_new_reqs
    ]
    known = [
        RequestUpdate(
            request_id,
            num_computed_tokens,
            _take_one_group(block_ids),
            replaces_blocks=request_id in cached.resumed_req_ids,
            num_tokens=scheduled.get(request_id, 0),
        )
        for request_id, num_computed_tokens, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        )
    ]
    return ScheduleUpdate((*new, *known), frozenset(scheduler_output.finished_req_ids))


def _take_one_group(block_ids: tuple[list[int], ...] | None) -> list[int]:
    """The blocks of the one group of caches; the placement has refused models with several."""
    if block_ids is None:
        return []
    (only,) = block_ids
    return only


def attach(
    transfers: LayerTransfers,
    tables: BlockTables,
    target_layers: tuple[TargetLayer, ...],
    layers: Mapping[str, Any],
    model_runner: Any,
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
    attentions = tuple(find_attentions([name for layer in target_layers for name in layer.names], layers))

    def start_forward(_model: Any, _inputs: Any) -> None:
        # A dummy run may have no forward context to ask.
        transfers.start_forward(find_decode_rows(attentions) if transfers.asks_for_rows else None)

    model.register_forward_pre_hook(start_forward)
    _enclose_steps(model_runner, transfers, tables)


def _enclose_steps(model_runner: Any, transfers: LayerTransfers, tables: BlockTables) -> None:
    original = model_runner.execute_model

    @wraps(original)
    def execute_model(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        # Runner V2 sends its dummy runs through here, V1 does not. They compute no request, so they are no step.
        if kwargs.get("dummy_run", False):
            return original(scheduler_output, *args, **kwargs)
        with transfers.step(tables.advance(describe_schedule(scheduler_output))):
            return original(scheduler_output, *args, **kwargs)

    model_runner.execute_model = execute_model
