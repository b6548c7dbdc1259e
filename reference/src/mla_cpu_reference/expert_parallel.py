"""Expert parallelism on CPU: each rank's kernel gets the numbers of its own experts."""

from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def localize_experts(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the chosen experts as this rank's weights do; choices of other ranks weigh nothing.

    Both are `[tokens, topk]`. `expert_map` `[experts]` holds the local number of each expert, -1 for another rank's.
    Such a choice becomes expert 0 with weight 0: the kernel has no way to skip one.
    """
    local_ids = expert_map[topk_ids.long()]
    is_remote = local_ids < 0
    return topk_weights.masked_fill(is_remote, 0.0), local_ids.clamp(min=0).to(topk_ids.dtype)


def apply() -> None:
    """Map expert numbers before the kernel of unquantised experts, which would read beyond this rank's weights."""
    original = CPUUnquantizedExperts.apply

    @wraps(original)
    def apply_experts(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **kwargs: Any) -> None:
        if expert_map is not None:
            if kwargs["apply_router_weight_on_input"]:
                # The kernel then ignores topk_weights, so another rank's choice could not weigh nothing.
                raise NotImplementedError(
                    "expert_parallel on CPU: this model applies the router's weights to the experts' input; it needs "
                    "them applied to the output. Set enable_expert_parallel to false"
                )
            topk_weights, topk_ids = localize_experts(topk_weights, topk_ids, expert_map)
        original(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **kwargs)

    CPUUnquantizedExperts.apply = apply_experts
