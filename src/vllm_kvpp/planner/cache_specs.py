"""The caches that vLLM makes for a model, by name and page: what the runtime reads from vLLM's specs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_kvpp.plan import LayerCache
from vllm_kvpp.plan.cache_forms import CacheForm, plain_latent, quantised_indexer, quantised_latent
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.model import MLAModel

PACKED = "fp8_ds_mla"
# The one shape that vLLM's packed format knows.
PACKED_WIDTHS = (512, 64)
BYTES_PER_VALUE = {
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
KV_CACHE_DTYPES = ("auto", *BYTES_PER_VALUE, PACKED)
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class StageCaches:
    """All caches of one pipeline stage, and which of them belong to draft layers."""

    layers: range
    caches: tuple[LayerCache, ...]
    draft_names: frozenset[str]


def list_stage_caches(
    model: MLAModel, partition: Sequence[int], *, block_size: int, latent: CacheForm, has_drafts: bool
) -> tuple[StageCaches, ...]:
    """The caches of every stage. Draft layers are on the last one, as in vLLM.

    Raises:
        PlannerError: drafts are asked for, and the model has no draft layer; or the indexer has an unknown shape.
    """
    if has_drafts and model.num_draft_layers == 0:
        raise PlannerError(
            f"--draft is mtp, but {model.name} has no draft layer (num_nextn_predict_layers is 0 or absent); leave "
            "--draft out."
        )
    stages: list[StageCaches] = []
    for index, num_layers in enumerate(partition):
        first = sum(partition[:index])
        layers = range(first, first + num_layers)
        targets = tuple(cache for number in layers for cache in _list_target(model, number, latent, block_size))
        is_last = index == len(partition) - 1
        drafts = tuple(_list_drafts(model, latent, block_size)) if has_drafts and is_last else ()
        stages.append(StageCaches(layers, (*targets, *drafts), frozenset(cache.name for cache in drafts)))
    return tuple(stages)


def choose_latent_form(model: MLAModel, kv_cache_dtype: str, dtype: str) -> CacheForm:
    """How a latent is stored; `auto` is the type that the model runs in.

    Raises:
        PlannerError: the type is unknown, or cannot hold this model's latent.
    """
    widths = (model.latent_width, model.rotary_width)
    if kv_cache_dtype == "auto":
        return plain_latent(*widths, DTYPES[dtype])
    if kv_cache_dtype in BYTES_PER_VALUE:
        return plain_latent(*widths, BYTES_PER_VALUE[kv_cache_dtype])
    if kv_cache_dtype != PACKED:
        raise PlannerError(
            f"--kv-cache-dtype is {kv_cache_dtype!r}, which the plan does not know; use {', '.join(KV_CACHE_DTYPES)}."
        )
    if widths != PACKED_WIDTHS:
        raise PlannerError(
            f"--kv-cache-dtype is {PACKED}, which packs latents of 512 + 64 values, but {model.name} has "
            f"{widths[0]} + {widths[1]}; use auto or fp8."
        )
    return quantised_latent(*widths)


def _list_target(model: MLAModel, number: int, latent: CacheForm, block_size: int) -> Iterator[LayerCache]:
    for attention in _name_attentions(model, number):
        yield from latent.make_caches(f"{attention}.attn", block_size)
        if model.indexer is not None and number in model.indexer.layers:
            yield from _make_indexer(model, attention, block_size)


def _list_drafts(model: MLAModel, latent: CacheForm, block_size: int) -> Iterator[LayerCache]:
    for number in range(model.num_layers, model.num_layers + model.num_draft_layers):
        attention = f"model.layers.{number}.self_attn"
        yield from latent.make_caches(f"{attention}.attn", block_size)
        if model.indexer is not None:
            yield from _make_indexer(model, attention, block_size)


def _name_attentions(model: MLAModel, number: int) -> tuple[str, ...]:
    name = f"model.layers.{number}.self_attn"
    if model.attentions_per_layer == 1:
        return (name,)
    return tuple(f"{name}.{index}" for index in range(model.attentions_per_layer))


def _make_indexer(model: MLAModel, attention: str, block_size: int) -> tuple[LayerCache, ...]:
    assert model.indexer is not None
    try:
        form = quantised_indexer(model.indexer.head_width)
    except ValueError as error:
        raise PlannerError(f"index_head_dim of {model.name} is not supported: {error}.") from error
    return form.make_caches(f"{attention}.indexer.k_cache", block_size)
