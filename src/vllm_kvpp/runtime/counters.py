"""What the runtime did since the start."""

from dataclasses import asdict, dataclass


@dataclass
class TransferCounters:
    """Counts of one rank. `transferred_bytes` counts each bundle that the rank sent or received."""

    steps: int = 0
    steps_with_history: int = 0
    transfers: int = 0
    transferred_bytes: int = 0
    host_wait_seconds: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Plain values for logs and reports."""
        return asdict(self)
