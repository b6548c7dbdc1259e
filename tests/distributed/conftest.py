"""Rank processes for the multi-rank tests: one set of four that most tests share, and small ones to be broken."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests and the processes they start import the same package; a started process takes over this path.
sys.path.insert(0, str(Path(__file__).parent))

from multirank.rank_processes import RankProcesses
from multirank.scenarios import GROUP_BY_SIZE


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankProcesses]:
    """Four ranks with a group of each size; started at the first call, and again after a failure."""
    with RankProcesses(4, groups=[(0, 1), *GROUP_BY_SIZE.values()], timeout_seconds=15) as processes:
        yield processes


@pytest.fixture(params=GROUP_BY_SIZE.values(), ids=lambda ranks: f"group_of_{len(ranks)}")
def group_ranks(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """World ranks of a group among `four_ranks`, of each size."""
    ranks: tuple[int, ...] = request.param
    return ranks
