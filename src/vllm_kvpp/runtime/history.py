"""What a step computes, as far as transfers depend on it; the same on every rank, as the scheduler's output is."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One forward as the scheduler describes it: tokens already computed, for each request with tokens scheduled."""

    num_computed_tokens: Mapping[str, int]

    @property
    def has_history(self) -> bool:
        """Whether any scheduled request reads tokens of an earlier forward (R-RUN-1)."""
        return any(count > 0 for count in self.num_computed_tokens.values())
