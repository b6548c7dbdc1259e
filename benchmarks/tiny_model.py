"""A dense MLA model with the cache width of the real ones and everything else small; its weights are made up."""

import json
from pathlib import Path

NUM_LAYERS = 8
NUM_HEADS = 4
HIDDEN_SIZE = 128
LATENT_WIDTH = 512
ROPE_WIDTH = 64
VOCABULARY_SIZE = 512
MAX_POSITIONS = 16_384
BLOCK_SIZE = 16
DTYPE = "bfloat16"
DTYPE_BYTES = 2

# One block of one layer: what the product calls a page.
PAGE_BYTES = BLOCK_SIZE * (LATENT_WIDTH + ROPE_WIDTH) * DTYPE_BYTES


def write_tiny_model(folder: Path, num_heads: int = NUM_HEADS) -> Path:
    """Write `config.json` into `folder`, for `load_format="dummy"`."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "moe_intermediate_size": HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        # Dense: the experts below are named because the architecture asks for them, and none is made.
        "first_k_dense_replace": NUM_LAYERS,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": LATENT_WIDTH,
        "q_lora_rank": None,
        "qk_rope_head_dim": ROPE_WIDTH,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": DTYPE,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
