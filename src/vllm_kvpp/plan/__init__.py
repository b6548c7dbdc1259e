"""Pure planning: integers in, frozen values out. No torch, no vllm, no rank of its own."""

from vllm_kvpp.plan.bundles import LayerBundle, LayerCache
from vllm_kvpp.plan.cache_plan import NUM_SCRATCH_BUFFERS, BytesPerBlock, CachePlan, plan_cache
from vllm_kvpp.plan.owners import assign_owner_ranks, split_into_groups
from vllm_kvpp.plan.placement import ByteRange, PlacedBundle, PlacedCache, Placement, fit_num_blocks, place
from vllm_kvpp.plan.staging import plan_exchange, plan_staging, plan_tail
from vllm_kvpp.plan.transfer_way import StageShape, choose_way

__all__ = [
    "NUM_SCRATCH_BUFFERS",
    "ByteRange",
    "BytesPerBlock",
    "CachePlan",
    "LayerBundle",
    "LayerCache",
    "PlacedBundle",
    "PlacedCache",
    "Placement",
    "StageShape",
    "assign_owner_ranks",
    "choose_way",
    "fit_num_blocks",
    "place",
    "plan_cache",
    "plan_exchange",
    "plan_staging",
    "plan_tail",
    "split_into_groups",
]
