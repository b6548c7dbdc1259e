"""Which layers keep an indexer's cache beside their latent (sparse attention), by vLLM 0.32's rule."""

from dataclasses import dataclass

from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.fields import Fields

# The mark of a layer that takes over the choice of the one before, in `index_topk_pattern`.
SHARED_MARK = "S"
DEFAULT_OFFSET = 2


@dataclass(frozen=True)
class Indexer:
    """The attention indexer of a model; `layers` are the target layers that have one. Draft layers always have."""

    head_width: int
    num_heads: int
    num_chosen_tokens: int
    layers: frozenset[int]


def read_indexer(fields: Fields, model: str, num_layers: int) -> tuple[Indexer | None, tuple[str, ...]]:
    """Read the indexer, None for dense attention, and remarks.

    Raises:
        PlannerError: a field is missing or makes no sense.
    """
    if not fields.has("index_topk"):
        return None, ()
    layers = _find_layers(fields, model, num_layers)
    indexer = Indexer(
        head_width=fields.number("index_head_dim"),
        num_heads=fields.number("index_n_heads"),
        num_chosen_tokens=fields.number("index_topk"),
        layers=layers,
    )
    return indexer, _compare_with_types(fields, layers)


def _find_layers(fields: Fields, model: str, num_layers: int) -> frozenset[int]:
    pattern = fields.get("index_topk_pattern")
    if pattern is None:
        freq = fields.optional_number("index_topk_freq", minimum=1) or 1
        offset = fields.optional_number("index_skip_topk_offset")
        first = DEFAULT_OFFSET if offset is None else offset
        return frozenset(number for number in range(num_layers) if max(number - first + 1, 0) % freq == 0)
    if not isinstance(pattern, str | list):
        raise PlannerError(f"index_topk_pattern of {model} has to be a string like FFSS, one letter for each layer.")
    # Layers behind the pattern's end have an indexer.
    return frozenset(number for number in range(num_layers) if number >= len(pattern) or pattern[number] != SHARED_MARK)


def _compare_with_types(fields: Fields, layers: frozenset[int]) -> tuple[str, ...]:
    types = fields.get("indexer_types")
    if not isinstance(types, list):
        return ()
    if layers == frozenset(number for number, kind in enumerate(types) if kind == "full"):
        return ()
    return (
        f"indexer_types names {types.count('full')} layers with an indexer, but vLLM 0.32 goes by index_topk_pattern "
        f"and index_topk_freq, which give {len(layers)}; planned as vLLM does it.",
    )
