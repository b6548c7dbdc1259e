"""Write a trained model as a checkpoint folder that vLLM and Hugging Face transformers load."""

import json
from pathlib import Path

import torch
from model import RecallModel, RecallShape
from safetensors.torch import save_file
from vocabulary import END, PADDING, START, TOKEN_ID, save_tokenizer


def save_checkpoint(model: RecallModel, folder: Path) -> None:
    """Write configuration, bfloat16 weights and tokenizer into `folder`, which must exist."""
    config = json.dumps(hugging_face_config(model.shape), indent=2)
    (folder / "config.json").write_text(config + "\n")
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder, max_length=model.shape.max_position_embeddings)


def round_weights(model: RecallModel) -> None:
    """Round the weights in place to what `save_checkpoint` stores, so that an evaluation sees the same model."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def hugging_face_config(shape: RecallShape) -> dict[str, object]:
    """Return the `config.json` of `DeepseekV2ForCausalLM` with this shape and dense layers only."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "kv_lora_rank": shape.kv_lora_rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        # No experts: transformers wants a number here, and layers from `first_k_dense_replace` on would have them.
        "n_routed_experts": 0,
        "n_shared_experts": 0,
        "first_k_dense_replace": shape.num_layers,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": False,
        "bos_token_id": TOKEN_ID[START],
        "eos_token_id": TOKEN_ID[END],
        "pad_token_id": TOKEN_ID[PADDING],
    }
