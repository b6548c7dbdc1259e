"""How long a layer computes on one rank, by a roofline of bytes and operations: an estimate, and a low one.

Left out are launches, norms, sampling and the collectives of tensor parallelism, during which transfers go on too. Real
layers take longer, so more of a transfer is hidden than the plan says.
"""

from dataclasses import dataclass

from vllm_kvpp.planner.devices import GB, Device
from vllm_kvpp.planner.model import MLAModel
from vllm_kvpp.planner.weights import WeightShape

BANDWIDTH_REACHED = 0.8
OPERATIONS_REACHED = 0.5


@dataclass(frozen=True)
class Step:
    """The tokens that one forward computes: `tokens_each` of each request, behind `history` tokens of it."""

    name: str
    num_requests: int
    tokens_each: int
    history: int

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return self.num_requests * self.tokens_each

    @property
    def is_decode(self) -> bool:
        """Whether each request computes one token."""
        return self.tokens_each == 1


@dataclass(frozen=True)
class ComputeEstimate:
    """Seconds per layer on one device of a group."""

    device: Device
    model: MLAModel
    weights: WeightShape
    tp_size: int
    latent_bytes: int

    def layer_seconds(self, number: int, step: Step) -> float:
        """How long layer `number` takes at least: reading its weights and history, or its operations."""
        num_bytes = self._weight_bytes(number, step.num_tokens) + self._history_bytes(number, step)
        return max(self._read_seconds(num_bytes), self._operations(number, step) / self._operations_per_second())

    def owner_extra_seconds(self, number: int, step: Step) -> float:
        """How much longer attention takes at least with the heads of all ranks than with those of one."""
        reads = self._read_seconds(self._history_bytes(number, step))
        own = self._attention_operations(step) / self._operations_per_second()
        return max(reads, own * self.tp_size) - max(reads, own)

    def _read_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.device.bandwidth_gb_s * GB * BANDWIDTH_REACHED)

    def _operations_per_second(self) -> float:
        is_8_bit = self.weights.precision.expert_bytes == 1.0
        tflops = self.device.fp8_tflops if is_8_bit else self.device.bf16_tflops
        return tflops * 1e12 * OPERATIONS_REACHED

    def _weight_bytes(self, number: int, num_tokens: int) -> float:
        """Of the routed experts, those that `num_tokens` tokens choose, if they choose evenly."""
        total = self.weights.layer_bytes(number, self.tp_size)
        if not self.weights.is_sparse(number):
            return total
        experts = self.weights.num_experts * self.weights.expert * self.weights.precision.expert_bytes / self.tp_size
        untouched = (1 - self.weights.num_chosen_experts / self.weights.num_experts) ** num_tokens
        return total - untouched * experts

    def _history_bytes(self, number: int, step: Step) -> float:
        attended = self._count_attended(step)
        num_bytes = self.model.attentions_per_layer * attended * self.latent_bytes
        if self._has_indexer(number):
            assert self.model.indexer is not None
            num_bytes += step.history * self.model.indexer.head_width
        return step.num_requests * num_bytes

    def _operations(self, number: int, step: Step) -> float:
        """Two for each parameter and token, and those of attention: in decode on latents, in prefill on heads."""
        linear = 2.0 * step.num_tokens * self._active_parameters(number)
        total = linear + self._attention_operations(step)
        if self._has_indexer(number):
            assert self.model.indexer is not None
            width = self.model.indexer.num_heads * self.model.indexer.head_width
            total += 2.0 * step.num_tokens * (step.history + step.tokens_each / 2) * width
        return total

    def _attention_operations(self, step: Step) -> float:
        """With one rank's heads."""
        attended = self._count_attended(step) + step.tokens_each / 2
        heads = self.model.num_heads / self.tp_size * self.model.attentions_per_layer
        return 2.0 * step.num_tokens * attended * self._width_attended(step) * heads

    def _active_parameters(self, number: int) -> float:
        weights = self.weights
        divided = weights.attention + (weights.dense if weights.has_dense(number) else 0)
        if weights.is_sparse(number):
            divided += (weights.num_chosen_experts + weights.num_shared_experts) * weights.expert
        return weights.replicated + divided / self.tp_size

    def _width_attended(self, step: Step) -> int:
        model = self.model
        if step.is_decode:
            return 2 * model.latent_width + model.rotary_width
        return model.fields.number("qk_nope_head_dim") + model.rotary_width + model.fields.number("v_head_dim")

    def _count_attended(self, step: Step) -> int:
        if self.model.indexer is None:
            return step.history
        return min(step.history, self.model.indexer.num_chosen_tokens)

    def _has_indexer(self, number: int) -> bool:
        return self.model.indexer is not None and number in self.model.indexer.layers
