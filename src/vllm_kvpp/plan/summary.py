"""The start-up summary of one rank, in words and in plain values."""

from dataclasses import dataclass
from typing import Any

from vllm_kvpp.plan.cache_plan import CachePlan
from vllm_kvpp.plan.placement import Placement
from vllm_kvpp.selection import DecodeMode, TransferMode


@dataclass(frozen=True)
class CacheSummary:
    """What one rank stores and what it gains; the plan's numbers with the engine's block count."""

    plan: CachePlan
    placement: Placement
    group_rank: int
    block_size: int
    available_bytes: int
    transfer: TransferMode = "auto"
    transport: str = "broadcast"
    staging_bytes: int = 0
    decode: DecodeMode = "transfer"
    exchange_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds with KVPP."""
        return self.placement.num_blocks * self.block_size

    @property
    def num_tokens_without(self) -> int:
        """Tokens that the same memory holds with every layer on every rank."""
        if self.plan.full_bytes_per_block == 0:
            return 0
        return self.available_bytes // self.plan.full_bytes_per_block * self.block_size

    def as_dict(self) -> dict[str, Any]:
        """Plain values for reports."""
        per_block = self.plan.bytes_per_block(self.group_rank)
        return {
            "group_size": self.plan.group_size,
            "group_rank": self.group_rank,
            "num_target_layers": len(self.plan.bundles),
            "owned_layers": [bundle.layer_number for bundle in self.plan.owned_bundles(self.group_rank)],
            "bytes_per_block": {
                "owned": per_block.owned,
                "draft": per_block.draft,
                "scratch": per_block.scratch,
                "total": per_block.total,
                "without_kvpp": self.plan.full_bytes_per_block,
            },
            "num_blocks": self.placement.num_blocks,
            "block_size": self.block_size,
            "num_tokens": self.num_tokens,
            "num_tokens_without_kvpp": self.num_tokens_without,
            "available_bytes": self.available_bytes,
            "planned_bytes": self.placement.num_bytes,
            "staging_bytes": self.staging_bytes,
            "transfer": self.transfer,
            "transport": self.transport,
            "decode": self.decode,
            "exchange_bytes": self.exchange_bytes,
        }

    def as_lines(self) -> tuple[str, ...]:
        """The block for the start-up log."""
        per_block = self.plan.bytes_per_block(self.group_rank)
        owned = self.plan.owned_bundles(self.group_rank)
        factor = self.num_tokens / self.num_tokens_without if self.num_tokens_without else float("inf")
        unused = self.available_bytes - self.placement.num_bytes
        return (
            f"KVPP group rank {self.group_rank} of {self.plan.group_size}",
            f"  owned layers     {_span(tuple(bundle.layer_number for bundle in owned))}"
            f" ({len(owned)} of {len(self.plan.bundles)})",
            f"  bytes per block  {per_block.total:,} = {per_block.owned:,} owned + {per_block.draft:,} draft"
            f" + {per_block.scratch:,} scratch (without KVPP {self.plan.full_bytes_per_block:,})",
            f"  blocks           {self.placement.num_blocks:,} of {self.block_size} tokens",
            f"  tokens           {self.num_tokens:,} (without KVPP {self.num_tokens_without:,}; factor {factor:.2f})",
            f"  memory           {_gib(self.placement.num_bytes)} of {_gib(self.available_bytes)} GiB available,"
            f" {unused:,} bytes unused",
            f"  transfer         {self.transfer}, by {self.transport}, {self._describe_staging()}",
            f"  decode           {self._describe_decode()}",
        )

    def _describe_staging(self) -> str:
        if self.staging_bytes == 0:
            return "without staging memory"
        return f"through {self.staging_bytes:,} bytes of staging memory"

    def _describe_decode(self) -> str:
        if self.decode == "transfer":
            return "moves history"
        if self.decode == "in_place":
            return "in place: every rank reads the owners' memory"
        places = "at the owner" if self.decode == "owner" else "at the owner, or moves history, what costs less"
        return f"{places}; queries and outputs through {self.exchange_bytes:,} bytes"


def _span(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return "none"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.3f}"
