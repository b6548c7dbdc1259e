"""How many tokens fit, without KVPP, with it and with DCP: from the plan that the runtime makes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_kvpp.plan import BytesPerBlock, CachePlan, fit_num_blocks, place, plan_cache, plan_exchange, plan_tail
from vllm_kvpp.planner.cache_specs import StageCaches
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.selection import QueryShape, TransferMode

Transport = Literal["broadcast", "shared-memory"]


@dataclass(frozen=True)
class RankCapacity:
    """What one rank of a stage keeps, and how many blocks its memory holds."""

    group_rank: int
    owned_layers: tuple[int, ...]
    bytes_per_block: BytesPerBlock
    num_blocks: int


@dataclass(frozen=True)
class StageCapacity:
    """The ranks of one pipeline stage; `tail_bytes` is what each keeps for transfers and decode queries."""

    layers: range
    plan: CachePlan
    available_bytes: int
    tail_bytes: int
    ranks: tuple[RankCapacity, ...]

    @property
    def num_blocks_without(self) -> int:
        """Blocks that the same memory holds with every layer on every rank."""
        return self.available_bytes // self.plan.full_bytes_per_block

    @property
    def num_blocks(self) -> int:
        """Blocks with KVPP, of the rank with the fewest."""
        return min(rank.num_blocks for rank in self.ranks)


@dataclass(frozen=True)
class Capacity:
    """What the engine settles on: the fewest blocks of all ranks and stages."""

    block_size: int
    group_size: int
    stages: tuple[StageCapacity, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks with KVPP."""
        return min(stage.num_blocks for stage in self.stages)

    @property
    def num_blocks_without(self) -> int:
        """Blocks without KVPP."""
        return min(stage.num_blocks_without for stage in self.stages)

    @property
    def num_tokens(self) -> int:
        """Tokens with KVPP."""
        return self.num_blocks * self.block_size

    @property
    def num_tokens_without(self) -> int:
        """Tokens without KVPP."""
        return self.num_blocks_without * self.block_size

    @property
    def factor(self) -> float:
        """How many times as many tokens KVPP holds."""
        return self.num_tokens / self.num_tokens_without

    @property
    def saved_bytes(self) -> int:
        """What KVPP leaves free on the fullest rank while it holds only as many tokens as fit without it.

        Below 0 if KVPP needs more.
        """
        return min(_save(stage, self.num_blocks_without) for stage in self.stages)


def plan_capacity(
    stages: Sequence[StageCaches],
    available_bytes: Sequence[int],
    *,
    block_size: int,
    group_size: int,
    transfer: TransferMode = "auto",
    transport: Transport = "broadcast",
    queries: QueryShape | None = None,
) -> Capacity:
    """Plan every stage as the runtime does; `queries` are those that attend at the owners, None where none does.

    Raises:
        PlannerError: some rank's memory holds no block.
    """
    capacity = Capacity(
        block_size,
        group_size,
        tuple(
            _plan_stage(stage, available, group_size, transfer, transport, plan_exchange(queries, available))
            for stage, available in zip(stages, available_bytes, strict=True)
        ),
    )
    for stage in capacity.stages:
        _check_that_a_block_fits(stage)
    return capacity


def _plan_stage(
    stage: StageCaches,
    available_bytes: int,
    group_size: int,
    transfer: TransferMode,
    transport: Transport,
    exchange_bytes: int,
) -> StageCapacity:
    plan = plan_cache(stage.caches, group_size=group_size, draft_names=stage.draft_names)
    tail_bytes = exchange_bytes + _keep_for_transfers(plan, available_bytes - exchange_bytes, transfer, transport)
    ranks = tuple(
        RankCapacity(
            group_rank=rank,
            owned_layers=tuple(bundle.layer_number for bundle in plan.owned_bundles(rank)),
            bytes_per_block=plan.bytes_per_block(rank),
            num_blocks=fit_num_blocks(plan, rank, available_bytes, tail_bytes),
        )
        for rank in range(group_size)
    )
    return StageCapacity(stage.layers, plan, available_bytes, tail_bytes, ranks)


def _keep_for_transfers(plan: CachePlan, available_bytes: int, transfer: TransferMode, transport: Transport) -> int:
    shares_memory = transport == "shared-memory"
    return min(
        plan_tail(plan, rank, available_bytes, transfer=transfer, shares_memory=shares_memory)
        for rank in range(plan.group_size)
    )


def _check_that_a_block_fits(stage: StageCapacity) -> None:
    fullest = max(stage.ranks, key=lambda rank: rank.bytes_per_block.total)
    needed = max(fullest.bytes_per_block.total, stage.plan.full_bytes_per_block)
    if stage.num_blocks == 0 or stage.num_blocks_without == 0:
        raise PlannerError(
            f"The KV cache memory of {stage.available_bytes:,} bytes a rank holds no block, which takes {needed:,} "
            "bytes; raise --kv-memory or --gpu-memory-utilization, or lower --block-size."
        )


def _save(stage: StageCapacity, num_blocks: int) -> int:
    used = max(place(stage.plan, rank.group_rank, num_blocks, stage.tail_bytes).num_bytes for rank in stage.ranks)
    return num_blocks * stage.plan.full_bytes_per_block - used
