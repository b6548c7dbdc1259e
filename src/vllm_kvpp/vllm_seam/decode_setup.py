"""How this stage's decode rows can attend to the owners' memory, and all that takes: decided once, at the start."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_kvpp.config import KVPPOptions
from vllm_kvpp.plan import CachePlan
from vllm_kvpp.plan.decode_place import DecodeCosts
from vllm_kvpp.runtime.layer_transfers import TargetLayer, describe_stage
from vllm_kvpp.runtime.owner_decode import OwnerDecode, OwnerLinks
from vllm_kvpp.selection import DecodeMode, LinkTraits, QueryShape
from vllm_kvpp.transport.exchange import ExchangeArea
from vllm_kvpp.vllm_seam.decode_backends import (
    find_in_place_obstacle,
    find_obstacle,
    make_in_place_refusal,
    make_refusal,
)
from vllm_kvpp.vllm_seam.groups import KVPPGroup
from vllm_kvpp.vllm_seam.log import logger
from vllm_kvpp.vllm_seam.owner_decode import (
    DecodePlaces,
    attach_owner_decode,
    describe_queries,
    find_indexer_obstacle,
    find_places,
    find_sparse_obstacle,
)
from vllm_kvpp.vllm_seam.owner_view import OwnerView
from vllm_kvpp.vllm_seam.placement import RankMemory
from vllm_kvpp.vllm_seam.wait_points import in_order_of_access


@dataclass(frozen=True)
class DecodeSetup:
    """A stage whose decode rows can attend at the owners, or read their memory in place, or both."""

    places: DecodePlaces
    queries: QueryShape
    dtype: torch.dtype
    attends_at_owner: bool
    reads_in_place: bool

    @property
    def ways(self) -> str:
        """What the stage can do beside moving history, to be compared among ranks."""
        ways = {"in_place": self.reads_in_place, "owner": self.attends_at_owner}
        return ", ".join(name for name, is_possible in ways.items() if is_possible)

    def find_mode(self, asked: DecodeMode) -> DecodeMode:
        """What `kvpp.decode` comes to: with `auto`, reading in place is never dearer than another way."""
        return "in_place" if asked == "auto" and self.reads_in_place else asked

    def exchanges_queries(self, asked: DecodeMode) -> bool:
        """Whether the ranks need memory for decode queries."""
        return self.attends_at_owner and self.find_mode(asked) in ("auto", "owner")


def set_up_decode(
    plan: CachePlan, options: KVPPOptions, group: KVPPGroup, vllm_config: VllmConfig, model_runner: Any
) -> DecodeSetup | None:
    """Look at this stage's attention; None if all it can do is to have its history moved, or if it is to.

    Raises:
        KVPPConfigError: `kvpp.decode` is `owner` or `in_place`, and the attention cannot.
    """
    if options.decode == "transfer" or not plan.bundles:
        return None
    modules = vllm_config.compilation_config.static_forward_context
    owner_ranks: dict[str, int] = {}
    for bundle, owner_rank in zip(plan.bundles, plan.owner_ranks, strict=True):
        names = in_order_of_access(tuple(cache.name for cache in bundle.components), modules)
        owner_ranks |= dict.fromkeys(names, owner_rank)
    names = tuple(owner_ranks)
    has_drafts = vllm_config.speculative_config is not None
    places = find_places(names, owner_ranks, modules, model_runner.get_model(), has_drafts=has_drafts)
    pcp_size = vllm_config.parallel_config.prefill_context_parallel_size
    attentions = places.attentions.values()
    on_cpu = group.device.type == "cpu"
    obstacle = find_obstacle(attentions, prefill_context_parallel_size=pcp_size, on_cpu=on_cpu) or find_sparse_obstacle(
        names, places
    )
    in_place_obstacle = find_in_place_obstacle(
        attentions, prefill_context_parallel_size=pcp_size, shares_memory=group.shares_memory, on_cpu=on_cpu
    ) or find_indexer_obstacle(places)
    if options.decode == "owner" and obstacle is not None:
        raise make_refusal(obstacle)
    if options.decode == "in_place" and in_place_obstacle is not None:
        raise make_in_place_refusal(in_place_obstacle)
    if obstacle is not None and in_place_obstacle is not None:
        logger.warning_once("Decode moves history: its tokens cannot attend at the owner (%s).", obstacle)
        return None
    dtype = vllm_config.model_config.dtype
    return DecodeSetup(
        places,
        describe_queries(places, group.size, dtype),
        dtype,
        attends_at_owner=obstacle is None,
        reads_in_place=in_place_obstacle is None,
    )


def attach_decode(
    setup: DecodeSetup,
    options: KVPPOptions,
    group: KVPPGroup,
    layers: Sequence[TargetLayer],
    memories: Sequence[RankMemory],
    *,
    exchange_bytes: int,
    link: LinkTraits,
) -> OwnerDecode:
    """Make what the stage can do, and attach it to the layers. Collective.

    `memories` are those of all ranks, by group rank, or of this one where it cannot read the others'.
    """
    exchange = None
    if exchange_bytes > 0:
        areas = [ExchangeArea(memory.view_exchange(exchange_bytes), setup.queries, setup.dtype) for memory in memories]
        exchange = group.make_exchange(areas)
    costs = DecodeCosts(
        describe_stage(layers),
        len(setup.places.attentions),
        setup.queries,
        link,
        exchange.traits if exchange is not None else None,
    )
    decode = OwnerDecode(
        setup.places.places,
        OwnerLinks(exchange, group.make_reads() if setup.reads_in_place else None),
        costs,
        group_rank=group.rank,
        group_label=group.label,
        mode=options.decode,
        warn=logger.warning,
    )
    attach_owner_decode(setup.places, decode, setup.dtype, _view_owners(setup, group.rank, memories))
    return decode


def _view_owners(setup: DecodeSetup, group_rank: int, memories: Sequence[RankMemory]) -> dict[str, OwnerView]:
    """Where the caches of the attentions are that other ranks own."""
    if not setup.reads_in_place:
        return {}
    return {
        place.name: OwnerView(
            memories[group_rank].view_pages(place.name), memories[place.owner_rank].view_pages(place.name)
        )
        for place in setup.places.places
        if place.owner_rank != group_rank
    }
