from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from mla_cpu_reference import expert_parallel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, cpu_prepack_moe_weight

NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOPK, NUM_TOKENS = 6, 64, 32, 2, 10


class _Layer:
    """Random experts, and 10 tokens that choose 2 of them each."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.w13 = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=draw) / HIDDEN**0.5
        self.w2 = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=draw) / INTERMEDIATE**0.5
        self.tokens = torch.randn(NUM_TOKENS, HIDDEN, generator=draw)
        scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=draw)
        self.topk_weights, self.topk_ids = scores.topk(TOPK)

    def all_experts(self) -> torch.Tensor:
        """The sum over chosen experts, written as a loop."""
        output = torch.zeros(NUM_TOKENS, HIDDEN)
        for token in range(NUM_TOKENS):
            for weight, expert in zip(self.topk_weights[token], self.topk_ids[token], strict=True):
                gate, up = (self.w13[expert] @ self.tokens[token]).chunk(2)
                output[token] += weight * (self.w2[expert] @ (F.silu(gate) * up))
        return output

    def on_rank(self, owned: list[int], **changes: Any) -> torch.Tensor:
        """What vLLM's kernel sums with the weights of the owned experts alone."""
        expert_map = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32)
        expert_map[owned] = torch.arange(len(owned), dtype=torch.int32)
        experts = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
        experts.quant_config = FUSED_MOE_UNQUANTIZED_CONFIG
        experts._use_zentorch = False
        output = torch.empty(NUM_TOKENS, HIDDEN)
        call: dict[str, Any] = {
            "output": output,
            "hidden_states": self.tokens,
            "w1": cpu_prepack_moe_weight(self.w13[owned].contiguous(), experts.isa),
            "w2": cpu_prepack_moe_weight(self.w2[owned].contiguous(), experts.isa),
            "topk_weights": self.topk_weights,
            "topk_ids": self.topk_ids.to(torch.int32),
            "activation": MoEActivation.SILU,
            "global_num_experts": NUM_EXPERTS,
            "expert_map": expert_map,
            "a1q_scale": None,
            "a2_scale": None,
            "workspace13": torch.empty(0),
            "workspace2": torch.empty(0),
            "expert_tokens_meta": None,
            "apply_router_weight_on_input": False,
        }
        experts.apply(**{**call, **changes})
        return output


@pytest.fixture(autouse=True)
def _applied(monkeypatch: pytest.MonkeyPatch) -> None:
    # Noted for monkeypatch, which then undoes what the part changes.
    monkeypatch.setattr(CPUUnquantizedExperts, "apply", CPUUnquantizedExperts.apply)
    expert_parallel.apply()


@pytest.mark.parametrize("placement", [[[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]], [[4], [0, 1, 2, 3, 5]]])
def test_what_the_ranks_sum_is_what_all_experts_give(placement: list[list[int]]) -> None:
    layer = _Layer()
    summed = sum(layer.on_rank(owned) for owned in placement)
    torch.testing.assert_close(summed, layer.all_experts(), rtol=1e-4, atol=1e-5)


def test_a_rank_without_a_chosen_expert_adds_nothing() -> None:
    layer = _Layer()
    layer.topk_ids = layer.topk_ids.clamp(max=3)
    assert layer.on_rank([4, 5]).count_nonzero() == 0


def test_without_expert_parallelism_nothing_changes() -> None:
    layer = _Layer()
    output = layer.on_rank(list(range(NUM_EXPERTS)), expert_map=None)
    torch.testing.assert_close(output, layer.all_experts(), rtol=1e-4, atol=1e-5)


def test_weights_applied_to_the_input_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="Set enable_expert_parallel to false"):
        _Layer().on_rank([0, 1], apply_router_weight_on_input=True)
