"""How a step's decode rows reach their history: in the owner's memory, at the owner, or by moving it to every rank."""

from dataclasses import dataclass
from enum import Enum

from vllm_kvpp.plan.transfer_way import StageShape, choose_way, estimate_cost
from vllm_kvpp.selection import BlockRuns, DecodeMode, ExchangeTraits, LinkTraits, QueryShape, TransferMode


class DecodePlace(Enum):
    """Where the decode rows of a step attend to their history."""

    IN_PLACE = "in place"
    """At every rank, for its own heads, by reading the owner's memory."""
    OWNER = "owner"
    """At the owner, for the heads of all ranks."""
    EVERYWHERE = "everywhere"
    """At every rank, to which the history is moved."""


@dataclass(frozen=True)
class DecodeCosts:
    """What the choice rests on, beside the step: the stage with its attentions, and the prices of both ways.

    `exchange` is None where the ranks keep no memory for queries, so that rows cannot attend at the owner.
    """

    stage: StageShape
    num_attentions: int
    queries: QueryShape
    link: LinkTraits
    exchange: ExchangeTraits | None

    def at_owner(
        self, num_rows: int, num_attended_tokens: int, other_blocks: BlockRuns, transfer: TransferMode
    ) -> float:
        """Attend at the owners, and move the history of the rest of the batch."""
        assert self.exchange is not None, "there is no exchange"
        num_peer_heads = self.queries.num_peer_heads
        moved = num_rows * num_peer_heads * self.queries.head_bytes
        waited = num_attended_tokens * num_peer_heads * self.exchange.head_token_bytes
        one_attention = moved + waited + self.exchange.layer_bytes
        return self.num_attentions * one_attention + self.by_transfer(other_blocks, transfer)

    def by_transfer(self, blocks: BlockRuns, transfer: TransferMode) -> float:
        """Move the history of `blocks`; nothing if there are none."""
        if not blocks:
            return 0.0
        return estimate_cost(choose_way(transfer, blocks, self.stage, self.link), blocks, self.stage, self.link)


def chooses_owner(
    mode: DecodeMode,
    costs: DecodeCosts,
    *,
    num_rows: int,
    num_attended_tokens: int,
    active_blocks: BlockRuns,
    other_blocks: BlockRuns,
    transfer: TransferMode,
) -> bool:
    """Whether the decode rows of a step attend at the owners, if there is an exchange: as `mode`, or what costs less.

    With `auto` the other way is by transfers: where rows can read in place, they do.
    """
    if mode != "auto":
        return mode == "owner"
    at_owner = costs.at_owner(num_rows, num_attended_tokens, other_blocks, transfer)
    return at_owner <= costs.by_transfer(active_blocks, transfer)
