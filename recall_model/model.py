"""The recall model in plain torch: multi-head latent attention, dense MLPs, the parameter names of the checkpoint."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class RecallShape:
    """Sizes of the model. `kv_lora_rank` and `qk_rope_head_dim` are the only ones that vLLM's CPU MLA kernel takes."""

    vocab_size: int
    num_layers: int = 8
    hidden_size: int = 128
    intermediate_size: int = 256
    num_heads: int = 4
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 32
    v_head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048


def rotate(x: Tensor, shape: RecallShape) -> Tensor:
    """Apply rotary position embedding to `x` `[..., tokens, qk_rope_head_dim]`; a pair is two neighbouring entries."""
    dim = shape.qk_rope_head_dim
    frequency = shape.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@dataclass(frozen=True)
class CacheFault:
    """What is wrong with one layer's cache, for some rows of the batch.

    Where `is_wrong` `[heads, query tokens, key tokens]` holds, a query finds the latent row that `source_layer` cached
    for the token. Without a source it finds zeros.
    """

    layer: int
    rows: slice
    is_wrong: Tensor
    source_layer: int | None


class Attention(nn.Module):
    """Causal multi-head latent attention without a cache; keys and values come from one latent row a token."""

    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.shape = shape
        key_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        value_dim = shape.qk_nope_head_dim + shape.v_head_dim
        latent_dim = shape.kv_lora_rank + shape.qk_rope_head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * key_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden_size, latent_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(shape.kv_lora_rank, eps=shape.rms_norm_eps)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, shape.num_heads * value_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.v_head_dim, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `hidden` `[batch, tokens, hidden_size]` to the same shape."""
        query, (key, value) = self._queries(hidden), self.keys_and_values(hidden, self)
        # By hand: torch's fused attention on CPU wants one width for keys and values, and is slower here.
        weights = _causal_softmax(query @ key.transpose(-1, -2)).type_as(value)
        return self._join_heads(weights @ value)

    def forward_with_fault(self, hidden: Tensor, found: tuple[Tensor, Tensor], is_wrong: Tensor) -> Tensor:
        """Map `hidden` as `forward` does, but let the reads in `is_wrong` find the keys and values `found`."""
        query, (key, value) = self._queries(hidden), self.keys_and_values(hidden, self)
        scores = torch.where(is_wrong, query @ found[0].transpose(-1, -2), query @ key.transpose(-1, -2))
        weights = _causal_softmax(scores).type_as(value)
        return self._join_heads(weights.masked_fill(is_wrong, 0) @ value + weights.masked_fill(~is_wrong, 0) @ found[1])

    def keys_and_values(self, hidden: Tensor, source: "Attention") -> tuple[Tensor, Tensor]:
        """Return rotated keys and values `[batch, heads, tokens, dim]` from the latent rows that `source` would cache.

        The latent is four times as wide as `hidden`, so it is never formed: its square length is a quadratic form of
        `hidden`, and both projections multiply into one matrix. That is the same function at half the arithmetic.
        """
        sizes = [self.shape.kv_lora_rank, self.shape.qk_rope_head_dim]
        down, down_rope = source.kv_a_proj_with_mqa.weight.split(sizes)
        up = self.kv_b_proj.weight * source.kv_a_layernorm.weight
        # In float32: under autocast the square length would be off by more than the marks (marks.py) can bear.
        with torch.autocast("cpu", enabled=False):
            mean_square = ((hidden @ (down.T @ down)) * hidden).sum(-1, keepdim=True) / len(down)
        inverse_norm = torch.rsqrt(mean_square + self.shape.rms_norm_eps)
        key_value = functional.linear(hidden, up @ down)
        k_nope, value = self._split_heads(key_value * inverse_norm.type_as(key_value), self.shape.v_head_dim)
        k_rope = rotate(functional.linear(hidden, down_rope), self.shape)[:, None].type_as(k_nope)
        return torch.cat((k_nope, k_rope.expand(-1, self.shape.num_heads, -1, -1)), dim=-1), value

    def _queries(self, hidden: Tensor) -> Tensor:
        q_nope, q_rope = self._split_heads(self.q_proj(hidden), self.shape.qk_rope_head_dim)
        query = torch.cat((q_nope, rotate(q_rope, self.shape).type_as(q_nope)), dim=-1)
        return query / math.sqrt(query.shape[-1])

    def _split_heads(self, x: Tensor, last_dim: int) -> tuple[Tensor, Tensor]:
        heads = x.unflatten(-1, (self.shape.num_heads, -1)).transpose(1, 2)
        return heads[..., : self.shape.qk_nope_head_dim], heads[..., -last_dim:]

    def _join_heads(self, output: Tensor) -> Tensor:
        return self.o_proj(output.transpose(1, 2).flatten(-2))


def _causal_softmax(scores: Tensor) -> Tensor:
    is_future = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype).triu(1)
    return (scores + is_future).softmax(dim=-1)


class MLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `hidden` to the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """One decoder layer with a norm before each half."""

    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, token_ids: Tensor, faults: Sequence[CacheFault] = ()) -> Tensor:
        """Map `token_ids` `[batch, tokens]` to `[batch, tokens, hidden_size]`."""
        hidden = self.embed_tokens(token_ids)
        fault_of = {fault.layer: fault for fault in faults}
        inputs: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            inputs.append(layer.input_layernorm(hidden))
            attended = layer.self_attn(inputs[index])
            if index in fault_of:
                fault = fault_of[index]
                faulty = self._attend_with_fault(fault, inputs)
                attended = torch.cat((attended[: fault.rows.start], faulty, attended[fault.rows.stop :]))
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden)

    def _attend_with_fault(self, fault: CacheFault, inputs: list[Tensor]) -> Tensor:
        attention = self.layers[fault.layer].self_attn
        source_layer = fault.layer if fault.source_layer is None else fault.source_layer
        key, value = attention.keys_and_values(inputs[source_layer][fault.rows], self.layers[source_layer].self_attn)
        found = (key, value) if fault.source_layer is not None else (torch.zeros_like(key), torch.zeros_like(value))
        return attention.forward_with_fault(inputs[fault.layer][fault.rows], found, fault.is_wrong)


class RecallModel(nn.Module):
    """The whole model; its state dict has the names that `DeepseekV2ForCausalLM` loads."""

    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, token_ids: Tensor, faults: Sequence[CacheFault] = ()) -> Tensor:
        """Map `token_ids` `[batch, tokens]` to logits `[batch, tokens, vocab_size]`."""
        return self.lm_head(self.model(token_ids, faults))


def initialise(model: RecallModel) -> None:
    """Set the first weights: unit embeddings, 1/sqrt(fan-in) matrices, and 0.3 of that where a branch ends."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        elif "embed_tokens" in name:
            nn.init.normal_(parameter, std=1.0)
        else:
            gain = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(parameter, std=gain / math.sqrt(parameter.shape[1]))
