"""How a model is split over ranks: the sizes that were asked for, and the layers of each pipeline stage."""

from dataclasses import dataclass

from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.model import MLAModel


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the parallel groups; `partition` holds the number of layers of each pipeline stage."""

    tp_size: int
    pcp_size: int
    partition: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Ranks of one KVPP group (R-CFG-2)."""
        return self.tp_size * self.pcp_size

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.group_size * len(self.partition)


def split_model(model: MLAModel, *, tp_size: int, pcp_size: int, pp_size: int, partition: str | None) -> Parallelism:
    """Split the layers as vLLM does, or as `partition` says.

    Raises:
        PlannerError: the model cannot be split like this, or KVPP would have no effect.
    """
    if model.num_heads % tp_size:
        raise PlannerError(
            f"--tp is {tp_size}, which does not divide the {model.num_heads} attention heads of {model.name}; use "
            f"{_list_divisors(model.num_heads)}."
        )
    if pp_size > model.num_layers:
        raise PlannerError(f"--pp is {pp_size}, but {model.name} has {model.num_layers} layers; use fewer stages.")
    sizes = _split_evenly(model.num_layers, pp_size) if partition is None else _parse(partition, model, pp_size)
    parallelism = Parallelism(tp_size, pcp_size, sizes)
    if parallelism.group_size == 1:
        raise PlannerError("--tp is 1 and --pcp is 1, but KVPP needs a group larger than 1; use --tp 2 or more.")
    if parallelism.group_size > min(sizes):
        raise PlannerError(
            f"--tp {tp_size} and --pcp {pcp_size} make a group of {parallelism.group_size} ranks, but the smallest "
            f"stage has {min(sizes)} layers, so some ranks would own none; use --tp "
            f"{_largest_tp(model, pcp_size, sizes)} or less{', or fewer stages' if pp_size > 1 else ''}."
        )
    return parallelism


def _split_evenly(num_layers: int, pp_size: int) -> tuple[int, ...]:
    """As `get_pp_indices` of vLLM does: what is left over goes to the last stages but one."""
    sizes = [num_layers // pp_size] * pp_size
    for index in range(2, num_layers % pp_size + 2):
        sizes[-index] += 1
    return tuple(sizes)


def _parse(partition: str, model: MLAModel, pp_size: int) -> tuple[int, ...]:
    parts = partition.split(",")
    if not all(part.strip().isdecimal() and len(part) < 8 and int(part) > 0 for part in parts):
        raise PlannerError(f"--pp-partition is {partition[:80]!r}; use the layers of each stage, like 38,40.")
    sizes = tuple(int(part) for part in parts)
    if len(sizes) != pp_size:
        raise PlannerError(
            f"--pp-partition is {partition[:80]}, which names {len(sizes)} stages, but --pp is {pp_size}."
        )
    if sum(sizes) != model.num_layers:
        raise PlannerError(
            f"--pp-partition is {partition[:80]}, {sum(sizes)} layers together, but {model.name} has "
            f"{model.num_layers}."
        )
    return sizes


def _list_divisors(number: int) -> str:
    divisors = [str(size) for size in range(2, min(number, 64) + 1) if number % size == 0]
    return ", ".join(divisors) if divisors else "1"


def _largest_tp(model: MLAModel, pcp_size: int, sizes: tuple[int, ...]) -> int:
    largest = min(sizes) // pcp_size
    return max((size for size in range(1, largest + 1) if model.num_heads % size == 0), default=1)
