"""Make KVPP groups as a worker does, with vLLM loaded, and say what came of it."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from multirank.rank import Rank
from multirank.scenarios import Report, Scenario, run_on_transport
from multirank.transports import moves_nothing
from vllm_kvpp.errors import KVPPRankMismatchError


@dataclass(frozen=True)
class MadeGroup:
    """One rank's group, and what its checks said."""

    ranks: tuple[int, ...]
    rank: int
    label: str
    error_of_equal_values: str | None
    error_of_different_values: str | None
    report: Report


def make_and_use(rank: Rank, sizes: dict[str, int], scenario: Scenario) -> MadeGroup:
    """Make the group, compare values over it, and run a scenario through its transport."""
    # Only the ranks of these tests load vLLM, which takes seconds.
    from vllm_kvpp.vllm_seam.groups import KVPPGroup, make_group  # noqa: PLC0415

    def find_disagreement(group: KVPPGroup, value: str) -> str | None:
        try:
            group.check_agreement("the cache plan", value)
        except KVPPRankMismatchError as error:
            return str(error)
        return None

    group = make_group(SimpleNamespace(**sizes), torch.device("cpu"), rank.timeout_seconds)
    return MadeGroup(
        ranks=group.ranks,
        rank=group.rank,
        label=group.label,
        error_of_equal_values=find_disagreement(group, "equal"),
        error_of_different_values=find_disagreement(group, f"plan-{rank.world_rank}"),
        report=run_on_transport(rank, replace(scenario, group_ranks=group.ranks), group.transport),
    )


def probe_dead_transport(rank: Rank, sizes: dict[str, int]) -> str:
    """Make the group on a backend that delivers nothing, and return the error."""
    from vllm_kvpp.vllm_seam import groups  # noqa: PLC0415

    broken = patch.object(
        groups, "make_broadcast", lambda group, device, timeout_seconds: moves_nothing(group, 0, timeout_seconds)
    )
    try:
        with broken:
            groups.make_group(SimpleNamespace(**sizes), torch.device("cpu"), rank.timeout_seconds)
    except KVPPRankMismatchError as error:
        return str(error)
    raise AssertionError("nothing was delivered, and the probe did not notice")
