"""KVPP's state in one worker, from the group to the running transfers. The worker class only calls it."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from vllm_kvpp.config import read_settings
from vllm_kvpp.deployment import find_refusals
from vllm_kvpp.errors import KVPPBudgetError, KVPPConfigError
from vllm_kvpp.plan import CachePlan, fit_num_blocks, place, plan_cache, plan_exchange, plan_tail
from vllm_kvpp.plan.summary import CacheSummary
from vllm_kvpp.runtime.history import BlockTables
from vllm_kvpp.runtime.layer_transfers import LayerTransfers
from vllm_kvpp.selection import DecodeMode, QueryShape
from vllm_kvpp.transport.base import Transport
from vllm_kvpp.vllm_seam.attach import attach
from vllm_kvpp.vllm_seam.decode_setup import DecodeSetup, attach_decode, set_up_decode
from vllm_kvpp.vllm_seam.deployment import describe_deployment
from vllm_kvpp.vllm_seam.groups import make_group
from vllm_kvpp.vllm_seam.log import logger
from vllm_kvpp.vllm_seam.placement import RankMemory, describe_caches, find_backing, rewrite_tensors, view_layers


class KVPPSession:
    """One rank's KVPP: made in `init_device`, planned when memory is known, attached when the cache is bound."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        # The configuration has been validated when it was built, but vLLM goes on completing it behind that point.
        if refusals := find_refusals(describe_deployment(vllm_config)):
            raise KVPPConfigError(refusals)
        assert isinstance(vllm_config.additional_config, dict)
        self._options = read_settings(vllm_config.additional_config).options
        self._vllm_config = vllm_config
        self._group = make_group(
            vllm_config.parallel_config,
            device,
            self._options.transfer_timeout_seconds,
            may_share_memory=self._options.transport == "auto",
            # With "auto" it is not known yet whether decode reads in place instead.
            may_exchange=self._options.decode in ("auto", "owner"),
        )
        self._plan: CachePlan | None = None
        self._available_bytes = 0
        self._decode: DecodeSetup | None = None
        self._exchange_bytes = 0
        self._tail_bytes = 0
        self._summary: CacheSummary | None = None
        self._allocated_bytes = 0
        self._transfers: LayerTransfers | None = None

    def plan_budget(self, specs: dict[str, KVCacheSpec], available_bytes: int, model_runner: Any) -> int:
        """Turn the physical budget into the logical one, from which the engine arrives at our block count (R-MEM-2).

        Raises:
            KVPPBudgetError: no request fits, or `num_gpu_blocks_override` does not.
        """
        if not specs:
            return available_bytes
        layout = self._vllm_config.cache_config.get_resolved_kv_cache_layout()
        if not layout.is_layer_compact:
            raise KVPPConfigError(
                [
                    f"KVPP needs a KV cache layout with whole layers. (the layout is {layout.name}; "
                    "set the environment variable VLLM_KV_CACHE_LAYOUT to LBNHC)"
                ]
            )
        draft_names = find_draft_names(self._vllm_config, specs, model_runner)
        plan = plan_cache(describe_caches(specs, draft_names), group_size=self._group.size, draft_names=draft_names)
        self._group.check_agreement("the cache plan", plan.digest)
        self._plan = plan
        self._available_bytes = available_bytes
        self._decode = set_up_decode(plan, self._options, self._group, self._vllm_config, model_runner)
        ways = self._decode.ways if self._decode is not None else "transfer"
        self._group.check_agreement("how decode can reach its history", ways)
        own_exchange_bytes = plan_exchange(self._find_exchanged_queries(), available_bytes)
        self._exchange_bytes = min(self._group.gather(own_exchange_bytes))
        if self._decode is not None and self._options.decode == "owner" and self._exchange_bytes == 0:
            raise KVPPBudgetError(
                f"kvpp.decode is owner, but the KV cache memory of {available_bytes:,} bytes is too small for the "
                f"exchange of one query ({self._decode.queries.exchange_row_bytes:,} bytes, of 1/128 of it). Raise "
                "gpu_memory_utilization or kv_cache_memory_bytes, or set kvpp.decode to transfer."
            )
        self._tail_bytes = self._exchange_bytes + self._agree_on_tail(plan, available_bytes - self._exchange_bytes)
        num_blocks = fit_num_blocks(plan, self._group.rank, available_bytes, self._tail_bytes)
        self._check_budget(plan, num_blocks, block_size=next(iter(specs.values())).block_size)
        return num_blocks * plan.full_bytes_per_block

    def _find_exchanged_queries(self) -> QueryShape | None:
        decode = self._decode
        return decode.queries if decode is not None and decode.exchanges_queries(self._options.decode) else None

    def _find_decode_mode(self) -> DecodeMode:
        """What `kvpp.decode` comes to in this stage."""
        mode = self._decode.find_mode(self._options.decode) if self._decode is not None else "transfer"
        return "transfer" if mode in ("auto", "owner") and self._exchange_bytes == 0 else mode

    def _agree_on_tail(self, plan: CachePlan, available_bytes: int) -> int:
        """What every rank keeps for transfers; with staging memory, all cut their blocks into the same chunks."""
        asked = self._options.staging_bytes
        shares_memory = self._group.shares_memory
        if shares_memory and asked is not None:
            logger.warning_once("kvpp.staging_mib has no effect: the ranks copy from shared memory.")
        own = plan_tail(
            plan,
            self._group.rank,
            available_bytes,
            transfer=self._options.transfer,
            shares_memory=shares_memory,
            asked_bytes=asked,
        )
        return min(self._group.gather(own))

    def _check_budget(self, plan: CachePlan, num_blocks: int, *, block_size: int) -> None:
        override = self._vllm_config.cache_config.num_gpu_blocks_override
        if override is not None and override > num_blocks:
            raise KVPPBudgetError(
                f"num_gpu_blocks_override is {override}, but with KVPP {num_blocks} blocks fit. "
                f"{self._describe_cost(plan)} Lower num_gpu_blocks_override to {num_blocks} or less."
            )
        model = self._vllm_config.model_config
        # vLLM holds one block back. With max_model_len -1 it shortens the length itself.
        needed = -(-model.max_model_len // block_size) + 1 if model.original_max_model_len != -1 else 2
        if override is None and num_blocks < needed:
            raise KVPPBudgetError(
                f"One request of max_model_len {model.max_model_len} needs {needed} blocks, but with KVPP {num_blocks} "
                f"fit. {self._describe_cost(plan)} Raise gpu_memory_utilization or kv_cache_memory_bytes, or lower "
                f"max_model_len to {max(num_blocks - 1, 0) * block_size} or less."
            )

    def _describe_cost(self, plan: CachePlan) -> str:
        per_block = plan.bytes_per_block(self._group.rank)
        owned = [bundle.layer_number for bundle in plan.owned_bundles(self._group.rank)]
        return (
            f"A block costs group rank {self._group.rank} {per_block.total:,} bytes ({per_block.owned:,} for its "
            f"layers {owned}, {per_block.draft:,} for draft layers, {per_block.scratch:,} for two scratch buffers), "
            f"and {self._available_bytes:,} bytes are available, of which {self._tail_bytes:,} are kept for transfers."
        )

    def place(self, config: KVCacheConfig) -> KVCacheConfig:
        """Rewrite the placement for this rank, with the number of blocks that the engine settled on."""
        if self._plan is None:
            return config
        if len(config.kv_cache_groups) != 1:
            raise KVPPConfigError(
                [
                    "KVPP currently supports only non-hybrid MLA models. "
                    f"(vLLM made {len(config.kv_cache_groups)} KV cache groups of this model's layers; "
                    "set enable_kvpp to false)"
                ]
            )
        self._group.check_agreement("the number of blocks", config.num_blocks)
        placement = place(self._plan, self._group.rank, config.num_blocks, self._tail_bytes)
        if placement.num_bytes > self._available_bytes:
            raise KVPPBudgetError(
                f"{config.num_blocks} blocks need {placement.num_bytes:,} bytes, but {self._available_bytes:,} are "
                f"available. {self._describe_cost(self._plan)}"
            )
        self._summary = CacheSummary(
            plan=self._plan,
            placement=placement,
            group_rank=self._group.rank,
            block_size=config.kv_cache_groups[0].kv_cache_spec.block_size,
            available_bytes=self._available_bytes,
            transfer=self._options.transfer,
            transport="shared memory" if self._group.shares_memory else "broadcast",
            staging_bytes=0 if self._group.shares_memory else self._tail_bytes - self._exchange_bytes,
            decode=self._find_decode_mode(),
            exchange_bytes=self._exchange_bytes,
        )
        return rewrite_tensors(config, placement)

    def attach(self, model_runner: Any) -> None:
        """Check where the cache really lies, then attach to the runner."""
        if self._summary is None:
            return
        placement = self._summary.placement
        modules = self._vllm_config.compilation_config.static_forward_context
        backing = find_backing(placement, modules)
        self._allocated_bytes = backing.numel()
        own = RankMemory(placement, backing)
        peers = self._share(own)
        layers = view_layers(own, modules, peers)
        transport = self._make_transport(own)
        decode = None
        if self._decode is not None and self._find_decode_mode() != "transfer":
            decode = attach_decode(
                self._decode,
                self._options,
                self._group,
                layers,
                peers or (own,),
                exchange_bytes=self._exchange_bytes,
                link=transport.traits,
            )
        self._transfers = LayerTransfers(layers, transport, self._group.label, self._options.transfer, decode)
        attach(self._transfers, BlockTables(self._summary.block_size), layers, modules, model_runner)
        if self._group.rank == 0 and self._vllm_config.parallel_config.data_parallel_index == 0:
            logger.info("%s", "\n".join(self._summary.as_lines()))

    def _share(self, own: RankMemory) -> tuple[RankMemory, ...]:
        """Every rank's memory, by group rank; empty if transfers do not need it."""
        if not self._group.shares_memory:
            return ()
        assert self._plan is not None, "shared before it was planned"
        num_blocks = own.placement.num_blocks
        placements = [place(self._plan, rank, num_blocks, self._tail_bytes) for rank in range(self._group.size)]
        memories = map(RankMemory, placements, self._group.share(own.backing))
        # This rank writes its own; the mapping of it that others get is for reading.
        return tuple(own if rank == self._group.rank else memory for rank, memory in enumerate(memories))

    def _make_transport(self, own: RankMemory) -> Transport:
        if self._group.shares_memory:
            return self._group.make_peer_copies()
        assert self._plan is not None, "used before it was planned"
        staging = own.view_staging(self._exchange_bytes)
        return self._group.make_broadcast(staging, self._plan.largest_bundle_page_bytes)

    def report(self) -> dict[str, Any]:
        """The summary, the allocation as measured, and the counters, in plain values."""
        summary = self._summary.as_dict() if self._summary is not None else {}
        counters = self._transfers.counters.as_dict() if self._transfers is not None else {}
        return {
            **summary,
            "group_ranks": list(self._group.ranks),
            "allocated_bytes": self._allocated_bytes,
            "counters": counters,
        }

    @property
    def transfers(self) -> LayerTransfers | None:
        """The running transfers, None before the cache is bound."""
        return self._transfers


def find_draft_names(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], model_runner: Any) -> frozenset[str]:
    """The draft layers that were really loaded (R-OWN-3), with or without a cache of their own.

    Touches: `drafter._draft_attn_layer_names` (runner V1), `speculator.draft_attn_layer_names` (runner V2),
    `KVCacheSpec.is_draft` (from vLLM 0.33). Because: the specs of vLLM 0.32 do not say it, and those of 0.33 not of a
    layer that shares a cache. Checked by: `check_seam`, but for `is_draft`, which is read where it exists.
    """
    if vllm_config.speculative_config is None:
        return frozenset()
    names = {name for name, spec in specs.items() if getattr(spec, "is_draft", False)}
    # Drafts are made on the last pipeline stage only; the other stages have neither.
    if (drafter := getattr(model_runner, "drafter", None)) is not None:
        names |= set(drafter._draft_attn_layer_names)
    elif (speculator := getattr(model_runner, "speculator", None)) is not None:
        names |= set(speculator.draft_attn_layer_names)
    return frozenset(names)
