"""How much memory of each rank is left to the KV cache: as given, or estimated from a device."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from vllm_kvpp.planner.devices import GIB, Device
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.weights import EMBEDDING_BYTES, WeightShape

# Activations, graphs and communicators, as a share of the device. A guess, and shown as one.
RUNTIME_SHARE = 0.05
LARGEST_MEMORY_BYTES = 1024**5
UNITS = {"": GIB, "b": 1, "kib": 1024, "mib": 1024**2, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class StageMemory:
    """KV cache memory of each rank of one stage; the rest of the device, if it was estimated."""

    available_bytes: int
    weight_bytes: int | None = None
    runtime_bytes: int | None = None

    @property
    def is_estimate(self) -> bool:
        """Whether weights were estimated to get here."""
        return self.weight_bytes is not None


def parse_memory(text: str) -> int:
    """Read an amount of memory, in GiB if no unit stands behind it.

    Raises:
        PlannerError: it is none.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)\s*", text.lower())
    num_bytes = int(Decimal(match[1]) * UNITS.get(match[2], 0)) if match is not None else 0
    if not 0 < num_bytes <= LARGEST_MEMORY_BYTES:
        raise PlannerError(f"--kv-memory is {text[:40]!r}; use the memory of one rank, like 46.8GiB, 512MiB or 40GB.")
    return num_bytes


def estimate_memory(
    device: Device, utilization: float, weights: WeightShape, stages: Sequence[range], *, tp_size: int, num_drafts: int
) -> tuple[StageMemory, ...]:
    """What `utilization` of the device leaves to the cache in every stage.

    Raises:
        PlannerError: the weights alone do not fit.
    """
    if not 0 < utilization <= 1:
        raise PlannerError(f"--gpu-memory-utilization is {utilization}; use a share above 0, up to 1.")
    budget = int(device.memory_bytes * utilization)
    runtime = int(device.memory_bytes * RUNTIME_SHARE)
    memories = tuple(
        _leave_to_cache(budget, runtime, _weigh(weights, stages, index, tp_size, num_drafts))
        for index in range(len(stages))
    )
    short = min(memories, key=lambda memory: memory.available_bytes)
    if short.available_bytes <= 0:
        assert short.weight_bytes is not None
        raise PlannerError(
            f"--gpu is {device.name}: weights of about {short.weight_bytes / GIB:.1f} GiB a rank leave nothing of "
            f"{budget / GIB:.1f} GiB to the KV cache; raise --tp, --pp or --gpu-memory-utilization."
        )
    return memories


def _leave_to_cache(budget: int, runtime: int, weight_bytes: int) -> StageMemory:
    return StageMemory(budget - runtime - weight_bytes, weight_bytes, runtime)


def _weigh(weights: WeightShape, stages: Sequence[range], index: int, tp_size: int, num_drafts: int) -> int:
    """One rank's weights: the embedding is on the first stage, the head and the draft layers on the last."""
    total = sum(weights.layer_bytes(number, tp_size) for number in stages[index])
    is_first, is_last = index == 0, index == len(stages) - 1
    num_embeddings = is_first + is_last
    if is_first and is_last:
        num_embeddings = weights.num_embeddings
    total += num_embeddings * weights.embedding * EMBEDDING_BYTES / tp_size
    if is_last:
        total += num_drafts * weights.layer_bytes(stages[-1].stop - 1, tp_size)
    return int(total)
