"""Which type vLLM 0.32 gives the cache: `--kv-cache-dtype` as typed, unless model or device decide otherwise."""

from typing import Any

from vllm_kvpp.planner.cache_specs import PACKED
from vllm_kvpp.planner.devices import BLACKWELL, HOPPER, Device
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.model import MLAModel

FP8_NAMES = ("fp8", "fp8_e4m3")
# Of these types vLLM stores the cache in 8 bits on Blackwell, unless asked otherwise.
FP8_ON_BLACKWELL = frozenset({"glm_moe_dsa"})


def resolve_cache_dtype(asked: str, model: MLAModel, device: Device | None) -> tuple[str, tuple[str, ...]]:
    """The type that is stored, and remarks where it is not the one asked for.

    Raises:
        PlannerError: the checkpoint asks for a type that the plan does not know.
    """
    found, notes = _follow_checkpoint(model) if asked == "auto" else (asked, ())
    stored, more = _follow_device(found, model, device)
    return stored, (*notes, *more)


def _follow_checkpoint(model: MLAModel) -> tuple[str, tuple[str, ...]]:
    """What a checkpoint of ModelOpt says about its cache; vLLM heeds no other for MLA."""
    quantization = model.fields.get("quantization_config")
    if not isinstance(quantization, dict) or not str(quantization.get("quant_method", "")).startswith("modelopt"):
        return "auto", ()
    scheme = _find_scheme(quantization)
    if scheme is None:
        return "auto", ()
    is_static_fp8 = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    if str(scheme).lower() == "fp8" or (is_static_fp8 and scheme.get("dynamic") is False):
        return "fp8_e4m3", ("The checkpoint asks for an fp8 cache, which auto follows; planned so.",)
    raise PlannerError(
        f"--kv-cache-dtype is auto, and {model.name} asks for a cache of the type {str(scheme)[:60]!r}, which the plan "
        "does not know; name the type with --kv-cache-dtype."
    )


def _find_scheme(quantization: dict[str, Any]) -> Any:
    nested = quantization.get("quantization")
    inner = nested if isinstance(nested, dict) else quantization
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if scheme := inner.get(name) or quantization.get(name):
            return scheme
    return None


def _follow_device(asked: str, model: MLAModel, device: Device | None) -> tuple[str, tuple[str, ...]]:
    """For sparse attention the kernels of a device decide about 8-bit types."""
    if model.indexer is None:
        return asked, ()
    generation = device.generation if device is not None else None
    if asked == "auto" and generation == BLACKWELL and model.model_type in FP8_ON_BLACKWELL:
        return "fp8_e4m3", ("On Blackwell vLLM makes auto fp8_e4m3 for this model; planned so.",)
    if asked in FP8_NAMES and generation == HOPPER:
        return PACKED, (f"On Hopper vLLM stores {asked} of sparse attention as {PACKED}; planned so.",)
    if asked in FP8_NAMES and generation is None:
        return asked, (f"On Hopper vLLM stores {asked} of sparse attention as {PACKED}: plan with that, or --gpu.",)
    return asked, ()
