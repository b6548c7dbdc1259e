"""An MLA model, as far as its caches go, read from its configuration."""

from dataclasses import dataclass, field
from typing import Any

from vllm_kvpp.planner.config_file import ConfigFile
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.fields import Fields
from vllm_kvpp.planner.indexer import Indexer, read_indexer
from vllm_kvpp.planner.kinds import TWO_ATTENTION_TYPES, check_kind

MOST_LAYERS = 512
# Where models that also see or hear keep the part that has the KV cache.
NESTED_IN = ("text_config", "language_config")


@dataclass(frozen=True)
class MLAModel:
    """What the caches of a model depend on, and the fields that estimates read beside it.

    `notes` are remarks for whoever reads the plan.
    """

    name: str
    architecture: str
    model_type: str
    num_layers: int
    attentions_per_layer: int
    latent_width: int
    rotary_width: int
    num_heads: int
    num_draft_layers: int
    indexer: Indexer | None
    dtype: str
    largest_length: int | None
    fields: Fields = field(compare=False)
    notes: tuple[str, ...] = ()


def read_model(config: ConfigFile) -> MLAModel:
    """Read a model's configuration, refusing what KVPP does not serve.

    Raises:
        PlannerError: the model is hybrid or uses no MLA, or a field is missing or makes no sense.
    """
    architecture = _read_architecture(config)
    values = _merge_nested(config)
    fields = Fields(values, config.name)
    check_kind(fields, config.name, architecture)
    model_type = str(fields.get("model_type"))
    has_two = model_type in TWO_ATTENTION_TYPES
    num_layers = _read_num_layers(fields, config.name, has_two)
    indexer, indexer_notes = read_indexer(fields, config.name, num_layers)
    dtype, dtype_notes = _read_dtype(fields)
    return MLAModel(
        name=config.name,
        architecture=architecture,
        model_type=model_type,
        num_layers=num_layers,
        attentions_per_layer=2 if has_two else 1,
        latent_width=fields.number("kv_lora_rank"),
        rotary_width=fields.number("qk_rope_head_dim", minimum=0),
        num_heads=fields.number("num_attention_heads"),
        num_draft_layers=fields.optional_number("num_nextn_predict_layers") or 0,
        indexer=indexer,
        dtype=dtype,
        largest_length=fields.optional_number("max_position_embeddings", minimum=1),
        fields=fields,
        notes=(*config.notes, *_note_defaults(config), *indexer_notes, *dtype_notes),
    )


def _read_architecture(config: ConfigFile) -> str:
    names = config.values.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])[:80]
    return "architecture unknown"


def _merge_nested(config: ConfigFile) -> dict[str, Any]:
    """The fields of the language model; quantization may be said on the outside."""
    for name in NESTED_IN:
        nested = config.values.get(name)
        if isinstance(nested, dict):
            outside = {key: config.values[key] for key in ("quantization_config", "dtype") if key in config.values}
            return {**outside, **nested}
    return dict(config.values)


def _read_num_layers(fields: Fields, model: str, has_two_attentions: bool) -> int:
    if has_two_attentions:
        # `num_hidden_layers` counts attentions there.
        half = fields.optional_number("num_hidden_layers", minimum=2)
        num_layers = half // 2 if half is not None and not fields.has("num_layers") else fields.number("num_layers")
    else:
        num_layers = fields.number("num_hidden_layers")
    if num_layers > MOST_LAYERS:
        raise PlannerError(
            f"num_hidden_layers is {num_layers:,} in the configuration of {model}; the plan takes {MOST_LAYERS:,}."
        )
    return num_layers


def _read_dtype(fields: Fields) -> tuple[str, tuple[str, ...]]:
    """What vLLM's `--dtype auto` makes of the checkpoint's type: 32-bit weights are run in 16 bits."""
    written = fields.get("dtype") or fields.get("torch_dtype")
    if written in ("bfloat16", "float16"):
        return str(written), ()
    if written in (None, "float32"):
        missing = "names no dtype" if written is None else "says float32"
        return "bfloat16", (f"The configuration {missing}; planned for bfloat16 (--dtype says otherwise).",)
    raise PlannerError(f"dtype is {str(written)[:40]!r} in the configuration; use bfloat16, float16 or float32.")


def _note_defaults(config: ConfigFile) -> tuple[str, ...]:
    if not config.has_defaults_only:
        return ()
    return (
        f"The catalogue has only the defaults of {config.name}'s class, not its checkpoint's config.json: "
        "check with the real file.",
    )
