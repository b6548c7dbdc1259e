"""The plan in plain values, for `--json`."""

from dataclasses import asdict
from typing import Any

from vllm_kvpp import __version__
from vllm_kvpp.planner.capacity import StageCapacity
from vllm_kvpp.planner.memory import StageMemory
from vllm_kvpp.planner.planning import Plan
from vllm_kvpp.planner.traffic import StepTraffic
from vllm_kvpp.planner.verdict import describe_verdicts


def make_document(plan: Plan) -> dict[str, Any]:
    """Write the plan in plain values; bytes, seconds and tokens are whole or unrounded."""
    capacity = plan.capacity
    return {
        "version": __version__,
        "options": asdict(plan.options),
        "model": {
            "name": plan.model.name,
            "architecture": plan.model.architecture,
            "num_layers": plan.model.num_layers,
            "dtype": plan.dtype,
            "kv_cache_dtype": plan.kv_cache_dtype,
        },
        "group_size": capacity.group_size,
        "num_ranks": plan.parallelism.num_ranks,
        "block_size": capacity.block_size,
        "stages": [
            _describe_stage(stage, memory) for stage, memory in zip(capacity.stages, plan.memories, strict=True)
        ],
        "num_blocks": capacity.num_blocks,
        "num_blocks_without_kvpp": capacity.num_blocks_without,
        "with_kvpp": asdict(plan.fit),
        "without_kvpp": asdict(plan.fit_without),
        "with_dcp": asdict(plan.fit_with_dcp) if plan.fit_with_dcp is not None else None,
        "dcp_refusal": plan.dcp_refusal,
        "factor": capacity.factor,
        "saved_bytes": capacity.saved_bytes,
        "device": asdict(plan.device) if plan.device is not None else None,
        "link": asdict(plan.link) if plan.link is not None else None,
        "decode_in_place": plan.decodes_in_place,
        "decode_at_owner": asdict(plan.owner_decode) if plan.owner_decode is not None else None,
        "steps": [_describe_step(traffic) for traffic in plan.steps],
        "verdicts": list(describe_verdicts(plan)),
        "notes": list(plan.notes),
    }


def _describe_stage(stage: StageCapacity, memory: StageMemory) -> dict[str, Any]:
    return {
        "first_layer": stage.layers.start,
        "num_layers": len(stage.layers),
        "available_bytes": stage.available_bytes,
        "is_estimate": memory.is_estimate,
        "weight_bytes": memory.weight_bytes,
        "runtime_bytes": memory.runtime_bytes,
        "tail_bytes": stage.tail_bytes,
        "bytes_per_block_without_kvpp": stage.plan.full_bytes_per_block,
        "num_blocks_without_kvpp": stage.num_blocks_without,
        "ranks": [
            {
                "group_rank": rank.group_rank,
                "owned_layers": list(rank.owned_layers),
                "bytes_per_block": {**asdict(rank.bytes_per_block), "total": rank.bytes_per_block.total},
                "num_blocks": rank.num_blocks,
            }
            for rank in stage.ranks
        ],
    }


def _describe_step(traffic: StepTraffic) -> dict[str, Any]:
    exposure = traffic.exposure
    return {
        "name": traffic.step.name,
        "num_requests": traffic.step.num_requests,
        "num_tokens": traffic.step.num_tokens,
        "history": traffic.step.history,
        "num_active_blocks": traffic.num_active_blocks,
        "active_bytes": traffic.active_bytes,
        "whole_bytes": traffic.whole_bytes,
        "moved_bytes": traffic.moved_bytes,
        "transfer_seconds": traffic.transfer_seconds,
        "compute_seconds": exposure.compute if exposure is not None else None,
        "exposed_seconds": exposure.exposed if exposure is not None else None,
        "first_layer_seconds": exposure.first_layer if exposure is not None else None,
        "is_hidden": exposure.is_hidden if exposure is not None else None,
    }
