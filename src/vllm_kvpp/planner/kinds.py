"""Which models KVPP can serve, read from what is in their configuration, as vLLM 0.32 reads it."""

from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.fields import Fields

# What vLLM 0.32 runs with MLA caches (`ModelArchConfigConvertorBase.is_deepseek_mla`), but for the types whose layers
# keep caches of several kinds.
MLA_TYPES = frozenset(
    {
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "longcat_flash",
        "pangu_ultra_moe",
    }
)
# Types of which each layer has two attentions, with a cache each, in vLLM 0.32.
TWO_ATTENTION_TYPES = frozenset({"longcat_flash"})

_HYBRID_FIELDS = (
    "compress_ratios",
    "linear_attn_config",
    "linear_num_heads",
    "linear_num_value_heads",
    "full_attention_interval",
    "full_attention_layers",
    "layer_group_size",
    "hybrid_override_pattern",
    "layers_block_type",
    "attn_type_list",
    "mamba_d_state",
    "sliding_window",
)
_FULL_ATTENTION_TYPES = frozenset({"full_attention", "attention", "indexed_attention", "deepseek_sparse_attention"})


def check_kind(fields: Fields, model: str, architecture: str) -> None:
    """Refuse what is not a non-hybrid MLA model.

    Raises:
        PlannerError: with the architecture and the reason.
    """
    if (reason := _find_hybrid_field(fields)) is not None:
        raise PlannerError(
            f"KVPP currently supports only non-hybrid MLA models. ({model}, {architecture}, is hybrid: {reason}, so "
            "not every layer keeps the same kind of cache; serve it without KVPP)"
        )
    if not fields.has("kv_lora_rank"):
        raise PlannerError(
            f"KVPP currently supports only non-hybrid MLA models. ({model}, {architecture}, has no kv_lora_rank, so "
            "no latent cache; its heads are already divided by tensor parallelism; serve it without KVPP)"
        )
    model_type = fields.get("model_type")
    if model_type is None:
        raise PlannerError(
            f"The configuration of {model} has no model_type, by which vLLM decides whether it uses MLA; add it."
        )
    if model_type not in MLA_TYPES:
        raise PlannerError(
            f"KVPP currently supports only non-hybrid MLA models. ({model}, {architecture}: vLLM 0.32 keeps no plain "
            f"MLA caches for model_type {str(model_type)[:60]}, but for {', '.join(sorted(MLA_TYPES))}; serve it "
            "without KVPP)"
        )


def _find_hybrid_field(fields: Fields) -> str | None:
    for name in _HYBRID_FIELDS:
        if fields.get(name):
            return f"it has {name}"
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list):
        others = sorted({str(kind)[:40] for kind in layer_types} - _FULL_ATTENTION_TYPES)
        if others:
            return f"its layer_types contain {', '.join(others)[:120]}"
    return None
