"""What one forward moves, how long that takes on a link, and how much of it stands behind compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_kvpp.plan import LayerBundle, StageShape, choose_way
from vllm_kvpp.planner.capacity import Capacity, StageCapacity
from vllm_kvpp.planner.compute import ComputeEstimate, Step
from vllm_kvpp.planner.devices import Link, seconds_on_link
from vllm_kvpp.selection import BlockRuns, LinkTraits, TransferMode, Way


@dataclass(frozen=True)
class Exposure:
    """Seconds of one forward through all stages.

    `first_layer` is the part of `exposed` that no compute can hide, as nothing runs before the first layer's transfer.
    """

    transfer: float
    compute: float
    exposed: float
    first_layer: float

    @property
    def is_hidden(self) -> bool:
        """Whether every transfer but the first of a stage ends within the compute of the layer before."""
        return self.exposed <= self.first_layer


@dataclass(frozen=True)
class StepTraffic:
    """One forward: bytes by the two ways, those that are moved, and what is known of its time."""

    step: Step
    num_active_blocks: int
    active_bytes: int
    whole_bytes: int
    moved_bytes: int
    transfer_seconds: float | None
    exposure: Exposure | None


def plan_traffic(
    capacity: Capacity, step: Step, mode: TransferMode, *, link: Link | None, compute: ComputeEstimate | None
) -> StepTraffic:
    """Count what a step moves and, with a link and an estimate of compute, how long compute waits for it."""
    num_active_blocks = step.num_requests * -(-step.history // capacity.block_size)
    active = BlockRuns(((0, num_active_blocks),)) if num_active_blocks else BlockRuns()
    shapes = [_describe(stage.plan.bundles, capacity.num_blocks) for stage in capacity.stages]
    # Calls are left out: how the blocks of a batch lie is not known beforehand.
    ways = [choose_way(mode, active, shape, LinkTraits(call_bytes=0)) for shape in shapes]
    moved = [
        _count_by_layer(stage, way, active, capacity.num_blocks)
        for stage, way in zip(capacity.stages, ways, strict=True)
    ]
    # All receivers get their copy at the rate of the link, one layer at a time.
    seconds = [[seconds_on_link(num_bytes, link) for num_bytes in stage] for stage in moved] if link else None
    return StepTraffic(
        step=step,
        num_active_blocks=num_active_blocks,
        active_bytes=sum(shape.bytes_moved(Way.RUNS, active) for shape in shapes),
        whole_bytes=sum(shape.bytes_moved(Way.WHOLE, active) for shape in shapes),
        moved_bytes=sum(map(sum, moved)),
        transfer_seconds=sum(map(sum, seconds)) if seconds is not None else None,
        exposure=_estimate_exposure(capacity, seconds, compute, step),
    )


def _describe(bundles: Sequence[LayerBundle], num_blocks: int) -> StageShape:
    return StageShape(
        num_blocks=num_blocks,
        num_layers=len(bundles),
        num_components=sum(len(bundle.components) for bundle in bundles),
        page_size_bytes=sum(bundle.page_size_bytes for bundle in bundles),
    )


def _count_by_layer(stage: StageCapacity, way: Way, active: BlockRuns, num_blocks: int) -> list[int]:
    """The bytes of every layer's transfer, by the runtime's own count."""
    return [_describe((bundle,), num_blocks).bytes_moved(way, active) for bundle in stage.plan.bundles]


def _estimate_exposure(
    capacity: Capacity, seconds: list[list[float]] | None, compute: ComputeEstimate | None, step: Step
) -> Exposure | None:
    if seconds is None or compute is None:
        return None
    parts = [
        _expose_stage(transfers, [compute.layer_seconds(number, step) for number in stage.layers])
        for stage, transfers in zip(capacity.stages, seconds, strict=True)
    ]
    return Exposure(
        transfer=sum(part.transfer for part in parts),
        compute=sum(part.compute for part in parts),
        exposed=sum(part.exposed for part in parts),
        first_layer=sum(part.first_layer for part in parts),
    )


def _expose_stage(transfers: list[float], computes: list[float]) -> Exposure:
    """Layer n's transfer starts when layer n-1 has waited, so it has the compute of layer n-1 to hide behind."""
    late = [
        max(later - before, 0.0)
        for (_, later), (before, _) in zip(pairwise(transfers), pairwise(computes), strict=True)
    ]
    return Exposure(sum(transfers), sum(computes), transfers[0] + sum(late), transfers[0])
