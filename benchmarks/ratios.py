"""Ratios of measurements that were taken in pairs, one right behind the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Ratio:
    """The median of the pairs' ratios, and their range.

    Each pair is divided before anything is summarised, so what slows a machine down for a while falls out of it.
    """

    median: float
    lowest: float
    highest: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f}–{self.highest:.2f}, n={self.num_pairs})"


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Divide each numerator by the denominator at the same place.

    Raises:
        ValueError: there are none, their numbers differ, or a denominator is not positive.
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError(f"pairs have two sides: {len(numerators)} numerators, {len(denominators)} denominators")
    if min(denominators) <= 0:
        raise ValueError(f"a denominator is not positive: {min(denominators)}")
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True)]
    return Ratio(median=median(ratios), lowest=min(ratios), highest=max(ratios), num_pairs=len(ratios))
