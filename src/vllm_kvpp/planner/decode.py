"""How decode reaches its history other than by transfers: at the owner, estimated, or by reading there in place.

At the owner, queries and outputs travel, and other ranks wait for its attention; in place, nothing travels.
"""

from dataclasses import dataclass

from vllm_kvpp.planner.cache_specs import DTYPES
from vllm_kvpp.planner.capacity import Capacity, Transport
from vllm_kvpp.planner.compute import ComputeEstimate, Step
from vllm_kvpp.planner.devices import Link, seconds_on_link
from vllm_kvpp.planner.model import MLAModel
from vllm_kvpp.planner.parallel import Parallelism
from vllm_kvpp.selection import QueryShape


@dataclass(frozen=True)
class OwnerDecode:
    """One decode step in which every layer attends at its owner.

    `exposed_seconds` is the time on the link and what the owner's attention takes longer than with each rank's share of
    the heads; nothing hides either. The calls of the two exchanges a layer are left out.
    """

    moved_bytes: int
    link_seconds: float | None
    exposed_seconds: float | None


def describe_queries(model: MLAModel, parallelism: Parallelism, dtype: str) -> QueryShape | None:
    """The decode queries of all ranks; None where they cannot attend at an owner, or the heads do not divide."""
    if parallelism.pcp_size > 1 or model.num_heads % parallelism.tp_size:
        return None
    return QueryShape(
        num_heads=model.num_heads,
        group_size=parallelism.group_size,
        query_width=model.latent_width + model.rotary_width,
        output_width=model.latent_width,
        element_bytes=DTYPES[dtype],
        num_choices=model.indexer.num_chosen_tokens if model.indexer is not None else 0,
    )


def find_in_place_obstacle(model: MLAModel, parallelism: Parallelism, transport: Transport) -> str | None:
    """Say why ranks cannot read an owner's memory in place and what to use, or None if they can.

    As in the runtime: ranks share memory on CPUs of one host, where vLLM's backend for dense attention can.
    """
    if transport != "shared-memory":
        return (
            f"--transport is {transport}, so ranks cannot read each other's memory; use --transport shared-memory on "
            "CPUs of one host, or --decode auto, owner or transfer"
        )
    if model.indexer is not None:
        return (
            f"{model.name} has sparse attention, whose history cannot be read in place; use --decode auto, owner or "
            "transfer"
        )
    if parallelism.pcp_size > 1:
        return f"--pcp is {parallelism.pcp_size}, so ranks have different tokens; use --pcp 1, or --decode auto"
    return None


def plan_owner_decode(
    capacity: Capacity,
    model: MLAModel,
    queries: QueryShape,
    step: Step,
    *,
    link: Link | None,
    compute: ComputeEstimate | None,
) -> OwnerDecode:
    """Count what a decode step moves if it attends at the owners, and how long the ranks wait for it."""
    layers = [number for stage in capacity.stages for number in stage.layers]
    bytes_a_layer = model.attentions_per_layer * step.num_tokens * queries.num_peer_heads * queries.head_bytes
    moved_bytes = len(layers) * bytes_a_layer
    link_seconds = seconds_on_link(moved_bytes, link) if link is not None else None
    exposed = None
    if link_seconds is not None and compute is not None:
        exposed = link_seconds + sum(compute.owner_extra_seconds(number, step) for number in layers)
    return OwnerDecode(moved_bytes, link_seconds, exposed)
