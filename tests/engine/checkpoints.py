"""Models for tests of form, not of answers: configurations that are never loaded, dummy and random weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INDEX_HEADS = 4
# A key is quantised in groups of 128.
INDEX_HEAD_DIM = 128

# How much of a state is the token's embedding, against what one layer adds: in about half of the cases it prevails.
LEANING = 0.5


HIDDEN, HEADS, RANK = 128, 4, 96
SMALL: dict[str, Any] = {
    "num_heads": HEADS,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "q_lora_rank": RANK,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "dtype": "float32",
}
SMALL_V3 = {
    **SMALL,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "moe_intermediate_size": HIDDEN,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def write_config(folder: Path, *, num_layers: int = 2, num_heads: int = 4, **changes: Any) -> Path:
    """Write `config.json` of a dense MLA model with the real cache width and everything else tiny."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": num_layers,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_mtp_checkpoint(folder: Path, *, num_layers: int) -> Path:
    """Write a random model with one MTP layer, with weights large enough that logprobs depend on the history.

    Both lean towards one fixed successor of each token, so that some drafts are accepted; both look at the history
    often enough to go elsewhere.
    """
    hidden, heads, rank, experts = HIDDEN, HEADS, RANK, 4
    write_config(
        folder,
        num_layers=num_layers,
        n_routed_experts=experts,
        num_nextn_predict_layers=1,
        **SMALL_V3,
    )
    weights = _RandomWeights()
    # Each layer adds about as much twice, in attention and behind it.
    weights.add_embedding(hidden, scale=LEANING * (2 * num_layers) ** 0.5)
    for number in range(num_layers):
        weights.add_layer(f"model.layers.{number}.", hidden=hidden, heads=heads, rank=rank)
        weights.add_mlp(f"model.layers.{number}.mlp.", hidden, 2 * hidden)
    weights.add_norm("model.norm", hidden)
    weights.add_successor_head(hidden)
    _add_mtp_layer(weights, f"model.layers.{num_layers}.", hidden=hidden, heads=heads, rank=rank, experts=experts)
    save_file(weights.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_sparse_checkpoint(
    folder: Path, *, num_layers: int, indexer_types: Sequence[str] | None = None, index_topk: int = 32
) -> Path:
    """Write a random model with sparse attention, in which every layer owns an indexer (as DeepSeek-V3.2).

    With `indexer_types`, "full" or "shared" for each layer, the "shared" ones reuse the last choice (as GLM-5.2).
    """
    hidden, heads, rank = HIDDEN, HEADS, RANK
    pattern: dict[str, Any] = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    if indexer_types is not None:
        pattern = {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "indexer_rope_interleave": True,
            "indexer_types": list(indexer_types),
            # vLLM reads this one, or a frequency and an offset, and no types.
            "index_topk_pattern": "".join({"full": "F", "shared": "S"}[kind] for kind in indexer_types),
        }
    write_config(
        folder,
        num_layers=num_layers,
        index_topk=index_topk,
        index_n_heads=INDEX_HEADS,
        index_head_dim=INDEX_HEAD_DIM,
        **SMALL,
        **pattern,
    )
    weights = _RandomWeights()
    weights.add_embedding(hidden)
    for number in range(num_layers):
        weights.add_layer(f"model.layers.{number}.", hidden=hidden, heads=heads, rank=rank)
        if indexer_types is None or indexer_types[number] == "full":
            weights.add_indexer(f"model.layers.{number}.self_attn.indexer.", hidden=hidden, rank=rank)
        weights.add_mlp(f"model.layers.{number}.mlp.", hidden, 2 * hidden)
    weights.add_norm("model.norm", hidden)
    weights.add("lm_head", 512, hidden, 2.0)
    save_file(weights.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_moe_checkpoint(folder: Path, *, num_layers: int, num_experts: int) -> Path:
    """Write a random model whose first layer is dense and whose others choose 2 of the experts for each token."""
    hidden, heads, rank = HIDDEN, HEADS, RANK
    write_config(
        folder,
        num_layers=num_layers,
        first_k_dense_replace=1,
        n_routed_experts=num_experts,
        num_nextn_predict_layers=0,
        **SMALL_V3,
    )
    weights = _RandomWeights()
    weights.add_embedding(hidden)
    for number in range(num_layers):
        weights.add_layer(f"model.layers.{number}.", hidden=hidden, heads=heads, rank=rank)
        if number == 0:
            weights.add_mlp(f"model.layers.{number}.mlp.", hidden, 2 * hidden)
        else:
            weights.add_moe(f"model.layers.{number}.mlp.", hidden=hidden, experts=num_experts)
    weights.add_norm("model.norm", hidden)
    weights.add("lm_head", 512, hidden, 2.0)
    save_file(weights.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _add_mtp_layer(weights: "_RandomWeights", prefix: str, *, hidden: int, heads: int, rank: int, experts: int) -> None:
    weights.add_layer(prefix, hidden=hidden, heads=heads, rank=rank)
    weights.add_moe(f"{prefix}mlp.", hidden=hidden, experts=experts)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights.add_norm(prefix + norm, hidden)
    from_embedding, from_hidden_state = torch.eye(hidden) * LEANING * 2**0.5, weights.draw(hidden, hidden, 0.3)
    weights.tensors[f"{prefix}eh_proj.weight"] = torch.cat((from_embedding, from_hidden_state), dim=1)
    for copied, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        weights.tensors[f"{prefix}{copied}.weight"] = weights.tensors[f"{name}.weight"].clone()


class _RandomWeights:
    """Named random tensors, the same in every run."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}

    def draw(self, num_out: int, num_in: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(num_out, num_in, generator=self.generator) * gain / num_in**0.5

    def add(self, name: str, num_out: int, num_in: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = self.draw(num_out, num_in, gain)

    def add_norm(self, name: str, width: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=self.generator)

    def add_embedding(self, hidden: int, scale: float = 1.0) -> None:
        self.tensors["model.embed_tokens.weight"] = self.draw(512, hidden) * scale * hidden**0.5

    def add_successor_head(self, hidden: int) -> None:
        """A head that finds in a token's embedding the token's successor, a fixed one."""
        successors = torch.randperm(512, generator=self.generator)
        embedding = torch.nn.functional.normalize(self.tensors["model.embed_tokens.weight"])
        self.tensors["lm_head.weight"] = torch.empty(512, hidden).index_copy_(0, successors, 2 * embedding)

    def add_mlp(self, prefix: str, hidden: int, intermediate: int) -> None:
        for name in ("gate_proj", "up_proj"):
            self.add(prefix + name, intermediate, hidden, 1.5)
        self.add(f"{prefix}down_proj", hidden, intermediate)

    def add_moe(self, prefix: str, *, hidden: int, experts: int) -> None:
        self.add(f"{prefix}gate", experts, hidden)
        self.tensors[f"{prefix}gate.e_score_correction_bias"] = 0.1 * torch.randn(experts, generator=self.generator)
        for expert in range(experts):
            self.add_mlp(f"{prefix}experts.{expert}.", hidden, hidden)
        self.add_mlp(f"{prefix}shared_experts.", hidden, hidden)

    def add_layer(self, prefix: str, *, hidden: int, heads: int, rank: int) -> None:
        attention = f"{prefix}self_attn."
        for name, width in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            self.add_norm(prefix + name, width)
        self.add(f"{attention}q_a_proj", rank, hidden)
        self.add_norm(f"{attention}q_a_layernorm", rank)
        self.add(f"{attention}q_b_proj", heads * (64 + 64), rank, 1.6)
        self.add(f"{attention}kv_a_proj_with_mqa", 512 + 64, hidden)
        self.add_norm(f"{attention}kv_a_layernorm", 512)
        self.add(f"{attention}kv_b_proj", heads * (64 + 64), 512, 1.6)
        self.add(f"{attention}o_proj", hidden, heads * 64, 1.6)

    def add_indexer(self, prefix: str, *, hidden: int, rank: int) -> None:
        self.add(f"{prefix}wq_b", INDEX_HEADS * INDEX_HEAD_DIM, rank)
        self.add(f"{prefix}wk", INDEX_HEAD_DIM, hidden)
        self.add_norm(f"{prefix}k_norm", INDEX_HEAD_DIM)
        self.tensors[f"{prefix}k_norm.bias"] = 0.1 * torch.randn(INDEX_HEAD_DIM, generator=self.generator)
        self.add(f"{prefix}weights_proj", INDEX_HEADS, hidden)
