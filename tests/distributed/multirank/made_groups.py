"""Make KVPP groups as a worker does, with vLLM loaded, and say what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from multirank.broken_transports import move_nothing
from multirank.rank import Rank
from multirank.scenarios import Report, Scenario, run_on_group
from vllm_kvpp.errors import KVPPRankMismatchError
from vllm_kvpp.transport.shared_memory import PAGE_BYTES, allocate_pages

if TYPE_CHECKING:
    from vllm_kvpp.vllm_seam.groups import KVPPGroup

# Only the ranks of these tests load vLLM, which takes seconds: inside their calls.
# ruff: noqa: PLC0415


@dataclass(frozen=True)
class MadeGroup:
    """One rank's group, and what its checks said; one report of each scenario."""

    ranks: tuple[int, ...]
    rank: int
    label: str
    shares_memory: bool
    error_of_equal_values: str | None
    error_of_different_values: str | None
    reports: tuple[Report, ...]


@dataclass(frozen=True)
class Unshared:
    """One rank's group where one rank of the world cannot open what others share."""

    shares_memory: bool
    error_of_sharing: str | None
    error_of_opening_pipes: str | None


def make_and_use(rank: Rank, sizes: dict[str, int], scenarios: tuple[Scenario, ...]) -> MadeGroup:
    """Make the group, compare values over it, and run each scenario."""
    group = _make(rank, sizes)
    return MadeGroup(
        ranks=group.ranks,
        rank=group.rank,
        label=group.label,
        shares_memory=group.shares_memory,
        error_of_equal_values=_find_error(lambda: group.check_agreement("the cache plan", "equal")),
        error_of_different_values=_find_error(
            lambda: group.check_agreement("the cache plan", f"plan-{rank.world_rank}")
        ),
        reports=tuple(
            run_on_group(
                replace(scenario, group_ranks=group.ranks),
                replace(group, shares_memory=scenario.setup.shares_memory),
            )
            for scenario in scenarios
        ),
    )


def make_without_sharing(rank: Rank, sizes: dict[str, int]) -> bool:
    """Make the group with sharing forbidden, and return whether it shares."""
    return _make(rank, sizes, may_share_memory=False).shares_memory


def make_where_nothing_opens(rank: Rank, sizes: dict[str, int], closed_rank: int) -> Unshared:
    """Make the group where `closed_rank` can open neither memory nor pipes of others, and share all the same."""
    from vllm_kvpp.vllm_seam import groups

    def refuse(handle: object) -> None:
        raise OSError("not permitted")

    is_closed = rank.world_rank == closed_rank
    with (
        patch.object(groups, "open_shared", refuse if is_closed else groups.open_shared),
        patch.object(groups, "open_writer", refuse if is_closed else groups.open_writer),
    ):
        group = _make(rank, sizes)
        return Unshared(
            group.shares_memory,
            _find_error(lambda: group.share(allocate_pages(PAGE_BYTES))),
            _find_error(group.make_peer_copies),
        )


def probe_dead_transport(rank: Rank, sizes: dict[str, int]) -> str | None:
    """Make the group on a backend that delivers nothing, and return the error."""
    from vllm_kvpp.vllm_seam import groups

    original = groups.KVPPGroup.make_broadcast
    with patch.object(groups.KVPPGroup, "make_broadcast", lambda group: move_nothing(original(group), group.rank)):
        return _find_error(lambda: _make(rank, sizes))


def _make(rank: Rank, sizes: dict[str, int], *, may_share_memory: bool = True) -> "KVPPGroup":
    from vllm_kvpp.vllm_seam.groups import make_group

    parallel = SimpleNamespace(**sizes)
    return make_group(parallel, torch.device("cpu"), rank.timeout_seconds, may_share_memory=may_share_memory)


def _find_error(action: Callable[[], object]) -> str | None:
    try:
        action()
    except KVPPRankMismatchError as error:
        return str(error)
    return None
