"""What the runtime did since the start."""

from dataclasses import asdict, dataclass

from vllm_kvpp.selection import TransferSeconds


@dataclass
class TransferCounters:
    """Counts of one rank.

    `transferred_bytes` and `transferred_blocks` count each bundle that the rank sent or received: those of the blocks
    that were moved. A transfer's time is split into what the rank waited for and what was hidden behind its compute.
    A step with history has transfers, or decode rows that attend at the owners or read in place, or both: each is
    counted. `exchanges` counts the attentions at the owners, and `query_bytes`, `output_bytes` and, of indexers,
    `choice_bytes` what this rank sent and received for them.
    """

    steps: int = 0
    steps_with_history: int = 0
    steps_with_transfers: int = 0
    steps_at_owner: int = 0
    steps_in_place: int = 0
    transfers: int = 0
    transferred_bytes: int = 0
    transferred_blocks: int = 0
    calls: int = 0
    exchanges: int = 0
    query_bytes: int = 0
    output_bytes: int = 0
    choice_bytes: int = 0
    waited_seconds: float = 0.0
    hidden_seconds: float = 0.0

    def add_seconds(self, seconds: TransferSeconds) -> None:
        """Count the time of one finished transfer."""
        self.waited_seconds += seconds.waited
        self.hidden_seconds += max(0.0, seconds.total - seconds.waited)

    def as_dict(self) -> dict[str, float]:
        """Plain values for logs and reports."""
        return asdict(self)
