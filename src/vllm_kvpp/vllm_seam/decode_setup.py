"""Whether this stage's decode rows can attend at the owners, and everything that takes: decided once, at the start."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_kvpp.config import KVPPOptions
from vllm_kvpp.plan import CachePlan
from vllm_kvpp.plan.decode_place import DecodeCosts
from vllm_kvpp.runtime.layer_transfers import TargetLayer, describe_stage
from vllm_kvpp.runtime.owner_decode import OwnerDecode
from vllm_kvpp.selection import LinkTraits, QueryShape
from vllm_kvpp.transport.exchange import ExchangeArea
from vllm_kvpp.vllm_seam.decode_backends import find_obstacle, make_refusal
from vllm_kvpp.vllm_seam.groups import KVPPGroup
from vllm_kvpp.vllm_seam.log import logger
from vllm_kvpp.vllm_seam.owner_decode import (
    DecodePlaces,
    attach_owner_decode,
    describe_queries,
    find_places,
    find_sparse_obstacle,
)
from vllm_kvpp.vllm_seam.placement import RankMemory
from vllm_kvpp.vllm_seam.wait_points import in_order_of_access


@dataclass(frozen=True)
class DecodeSetup:
    """A stage whose decode rows can attend at the owners."""

    places: DecodePlaces
    queries: QueryShape
    dtype: torch.dtype


def set_up_decode(
    plan: CachePlan, options: KVPPOptions, group: KVPPGroup, vllm_config: VllmConfig, model_runner: Any
) -> DecodeSetup | None:
    """Look at this stage's attention; None if it cannot attend at the owner, or is not to.

    Raises:
        KVPPConfigError: `kvpp.decode` is `owner`, and the attention cannot.
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
    obstacle = find_obstacle(
        places.attentions.values(),
        prefill_context_parallel_size=vllm_config.parallel_config.prefill_context_parallel_size,
        on_cpu=group.device.type == "cpu",
    ) or find_sparse_obstacle(names, places)
    if obstacle is None:
        dtype = vllm_config.model_config.dtype
        return DecodeSetup(places, describe_queries(places, group.size, dtype), dtype)
    if options.decode == "owner":
        raise make_refusal(obstacle)
    logger.warning_once("Decode moves history: its tokens cannot attend at the owner (%s).", obstacle)
    return None


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
    """Make the exchange, and attach it to the layers. Collective; `memories` are those of `KVPPGroup.make_exchange`."""
    areas = [ExchangeArea(memory.view_exchange(exchange_bytes), setup.queries, setup.dtype) for memory in memories]
    exchange = group.make_exchange(areas)
    decode = OwnerDecode(
        setup.places.places,
        exchange,
        DecodeCosts(describe_stage(layers), len(setup.places.attentions), setup.queries, link, exchange.traits),
        group_rank=group.rank,
        group_label=group.label,
        mode=options.decode,
        warn=logger.warning,
    )
    attach_owner_decode(setup.places, decode, setup.dtype)
    return decode
