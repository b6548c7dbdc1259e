"""How large a model's weights are, estimated from its configuration."""

from dataclasses import dataclass

from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.fields import Fields
from vllm_kvpp.planner.model import MLAModel

# Bits of one value beside 4-bit weights: a 16-bit scale for 32, or an 8-bit one for 16.
PACKED_INT4_BITS = 4 + 16 / 32
NVFP4_BITS = 4 + 8 / 16
EMBEDDING_BYTES = 2.0


@dataclass(frozen=True)
class Precision:
    """Bytes of one parameter, of routed experts and of all other linear layers."""

    expert_bytes: float
    linear_bytes: float


@dataclass(frozen=True)
class WeightShape:
    """Numbers of parameters of one layer and of the whole, and how many bytes each takes.

    `attention` is what tensor parallelism divides, `replicated` what every rank holds.
    """

    attention: int
    replicated: int
    dense: int
    expert: int
    num_experts: int
    num_chosen_experts: int
    num_shared_experts: int
    num_dense_layers: int
    moe_frequency: int
    has_both: bool
    embedding: int
    num_embeddings: int
    precision: Precision

    def is_sparse(self, number: int) -> bool:
        """Whether layer `number` has routed experts."""
        return (
            self.num_experts > 0
            and number >= self.num_dense_layers
            and (number - self.num_dense_layers) % self.moe_frequency == 0
        )

    def has_dense(self, number: int) -> bool:
        """Whether layer `number` has a dense feed-forward part."""
        return self.has_both or not self.is_sparse(number)

    def count_layer(self, number: int) -> int:
        """All parameters of layer `number`."""
        experts = (self.num_experts + self.num_shared_experts) * self.expert if self.is_sparse(number) else 0
        return self.attention + self.replicated + experts + (self.dense if self.has_dense(number) else 0)

    def count_all(self, num_layers: int) -> int:
        """All parameters of a model without drafts."""
        return sum(map(self.count_layer, range(num_layers))) + self.embedding * self.num_embeddings

    def layer_bytes(self, number: int, tp_size: int) -> float:
        """What one rank holds of layer `number`."""
        linear = self.replicated + self.attention / tp_size
        if self.has_dense(number):
            linear += self.dense / tp_size
        total = linear * self.precision.linear_bytes
        if self.is_sparse(number):
            total += self.num_shared_experts * self.expert / tp_size * self.precision.linear_bytes
            total += self.num_experts * self.expert / tp_size * self.precision.expert_bytes
        return total


def read_weights(model: MLAModel) -> WeightShape:
    """Read what the size of the weights depends on.

    Raises:
        PlannerError: a field is missing, or the quantization is unknown.
    """
    fields = model.fields
    hidden = fields.number("hidden_size")
    num_experts = fields.optional_number("n_routed_experts", "num_experts") or 0
    expert_width = fields.number("moe_intermediate_size", "expert_ffn_hidden_size") if num_experts else 0
    attention, replicated = _count_attention(model, hidden)
    return WeightShape(
        attention=model.attentions_per_layer * attention,
        replicated=model.attentions_per_layer * replicated + hidden * num_experts,
        dense=model.attentions_per_layer * 3 * hidden * fields.number("intermediate_size", "ffn_hidden_size"),
        expert=3 * hidden * expert_width,
        num_experts=num_experts,
        num_chosen_experts=fields.number("num_experts_per_tok", "moe_topk") if num_experts else 0,
        num_shared_experts=fields.optional_number("n_shared_experts") or 0,
        num_dense_layers=fields.optional_number("first_k_dense_replace") or 0,
        moe_frequency=fields.optional_number("moe_layer_freq", minimum=1) or 1,
        has_both=model.attentions_per_layer > 1,
        embedding=hidden * fields.number("vocab_size"),
        num_embeddings=1 if fields.get("tie_word_embeddings") is True else 2,
        precision=_read_precision(fields, model.name),
    )


def _count_attention(model: MLAModel, hidden: int) -> tuple[int, int]:
    """Parameters of one attention that are divided by tensor parallelism, and those on every rank."""
    fields, heads = model.fields, model.num_heads
    nope, value = fields.number("qk_nope_head_dim"), fields.number("v_head_dim")
    query_rank = fields.optional_number("q_lora_rank") or 0
    query = heads * (nope + model.rotary_width)
    divided = query * (query_rank or hidden) + heads * (nope + value) * model.latent_width + heads * value * hidden
    replicated = hidden * (query_rank + model.latent_width + model.rotary_width)
    if model.indexer is not None:
        indexer = model.indexer
        replicated += indexer.num_heads * indexer.head_width * query_rank
        replicated += hidden * (indexer.head_width + indexer.num_heads)
    return divided, replicated


def _read_precision(fields: Fields, model: str) -> Precision:
    quantization = fields.get("quantization_config")
    if not isinstance(quantization, dict) or not quantization:
        return Precision(EMBEDDING_BYTES, EMBEDDING_BYTES)
    method = str(quantization.get("quant_method", "")).lower()
    said = f"{method} {quantization.get('quant_algo', '')} {quantization.get('format', '')}".lower()
    if "fp4" in said:
        return Precision(NVFP4_BITS / 8, EMBEDDING_BYTES)
    if "pack-quantized" in said:
        return Precision(PACKED_INT4_BITS / 8, EMBEDDING_BYTES)
    if method in ("awq", "gptq"):
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        return Precision(PACKED_INT4_BITS / 8, PACKED_INT4_BITS / 8) if bits == 4 else Precision(1.0, 1.0)
    if any(mark in said for mark in ("fp8", "float-quantized", "int-quantized", "w8a8", "int8")):
        return Precision(1.0, 1.0)
    raise PlannerError(
        f"quantization_config of {model} is {said.strip()[:60]!r}, whose weights the plan cannot estimate; leave "
        "--gpu out and give the memory of each rank with --kv-memory."
    )
