"""Layer bundles: all caches of one layer, kept and sent as one (R-OWN-2)."""

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass

from vllm_kvpp.errors import KVPPConfigError


@dataclass(frozen=True)
class LayerCache:
    """One cache tensor of one layer, by the name vLLM gives it.

    `page_size_bytes` is the distance between two blocks: the bytes of one block, padding included.
    """

    name: str
    page_size_bytes: int

    def __post_init__(self) -> None:
        assert self.page_size_bytes > 0, f"{self.name} has a page of {self.page_size_bytes} bytes"

    @property
    def layer_number(self) -> int:
        """The layer's number, which is the first integer among the dotted parts of its name."""
        for part in self.name.split("."):
            if part.isdecimal():
                return int(part)
        raise KVPPConfigError(
            [f"The cache {self.name} has no layer number in its name, so it has no owner. (set enable_kvpp to false)"]
        )


@dataclass(frozen=True)
class LayerBundle:
    """All caches of one target layer: main KV, indexer, scales, quantised parts."""

    layer_number: int
    components: tuple[LayerCache, ...]

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all components."""
        return sum(component.page_size_bytes for component in self.components)


def bundle_by_layer(caches: Iterable[LayerCache]) -> tuple[LayerBundle, ...]:
    """Gather caches into bundles, sorted by layer number (2 before 10), which is the order of execution (R-OWN-1).

    Components are sorted by name, so that the result does not depend on the order of `caches`.
    """
    by_number: defaultdict[int, list[LayerCache]] = defaultdict(list)
    for cache in caches:
        by_number[cache.layer_number].append(cache)
    return tuple(
        LayerBundle(layer_number=number, components=tuple(sorted(by_number[number], key=lambda cache: cache.name)))
        for number in sorted(by_number)
    )


def split_draft_caches(
    caches: Iterable[LayerCache], draft_names: Set[str]
) -> tuple[tuple[LayerCache, ...], tuple[LayerCache, ...]]:
    """Separate target caches from draft caches; the latter are not partitioned (R-OWN-3).

    Raises:
        KVPPConfigError: a draft layer has no cache of its own, because it shares one of a target layer.
    """
    caches = tuple(caches)
    without_cache = sorted(draft_names - {cache.name for cache in caches})
    if without_cache:
        names = ", ".join(without_cache)
        raise KVPPConfigError(
            [
                f"KVPP does not support draft layers sharing target KV caches. "
                f"({names} has no cache of its own; remove --speculative-config)"
            ]
        )
    targets = tuple(cache for cache in caches if cache.name not in draft_names)
    drafts = tuple(sorted((cache for cache in caches if cache.name in draft_names), key=lambda cache: cache.name))
    return targets, drafts
