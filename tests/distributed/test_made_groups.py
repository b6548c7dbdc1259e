"""The groups that a worker makes, in real processes with vLLM's own types around them (R-RUN-6, R-RUN-7)."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from multirank.made_groups import (
    MadeGroup,
    Unshared,
    make_and_use,
    make_where_nothing_opens,
    make_without_sharing,
    probe_dead_transport,
)
from multirank.rank import Call
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario, find_problems
from multirank.schedules import mixed_batches
from multirank.setups import AT_OWNER, AUTO, FULL, IN_PLACE, PEERS, STAGED
from multirank.toy_model import make_layers

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

# Two pipeline stages of two ranks.
SIZES = {
    "data_parallel_size": 1,
    "pipeline_parallel_size": 2,
    "prefill_context_parallel_size": 1,
    "tensor_parallel_size": 2,
}
SCENARIO = Scenario(make_layers(5, with_indexer={1}), mixed_batches(), group_ranks=())
DENSE_SCENARIO = replace(SCENARIO, layers=make_layers(5))
FIRST_STAGE, SECOND_STAGE = "of ranks [0, 1]", "of ranks [2, 3]"


@pytest.fixture(scope="module")
def vllm_ranks() -> Iterator[RankProcesses]:
    """Four ranks that load vLLM at their first call."""
    with RankProcesses(4, groups=[], timeout_seconds=20) as processes:
        yield processes


def call_everywhere(function: object, *args: object) -> dict[int, Call]:
    assert callable(function)
    return {rank: Call(function, args) for rank in range(4)}


def test_each_stage_makes_a_group_that_works_and_notices_disagreement(vllm_ranks: RankProcesses) -> None:
    setups = (FULL, STAGED, AUTO, PEERS, *(setup.with_decode(AT_OWNER) for setup in (STAGED, PEERS)))
    scenarios = (
        *(replace(SCENARIO, setup=setup) for setup in setups),
        replace(DENSE_SCENARIO, setup=PEERS.with_decode(IN_PLACE)),
    )
    calls = call_everywhere(make_and_use, SIZES, scenarios)
    made: list[MadeGroup] = vllm_ranks.run(calls, limit_seconds=200)
    assert [(group.ranks, group.rank) for group in made] == [((0, 1), 0), ((0, 1), 1), ((2, 3), 0), ((2, 3), 1)]
    assert [group.label for group in made] == [FIRST_STAGE] * 2 + [SECOND_STAGE] * 2
    assert [group.shares_memory for group in made] == [True] * 4
    assert find_problems([report for group in made for report in group.reports]) == []
    assert [group.error_of_equal_values for group in made] == [None] * 4
    first = "The KVPP group of ranks [0, 1] does not agree on the cache plan: rank 0: plan-0, rank 1: plan-1."
    second = "The KVPP group of ranks [2, 3] does not agree on the cache plan: rank 2: plan-2, rank 3: plan-3."
    assert [group.error_of_different_values for group in made] == [first, first, second, second]


def test_a_backend_that_delivers_nothing_is_noticed(vllm_ranks: RankProcesses) -> None:
    errors = vllm_ranks.run(call_everywhere(probe_dead_transport, SIZES), limit_seconds=200)
    for error, peer in zip(errors, [1, 0, 3, 2], strict=True):
        assert f"does not deliver: a probe from rank {peer} did not arrive" in error


def test_a_group_that_may_not_share_memory_does_not(vllm_ranks: RankProcesses) -> None:
    assert vllm_ranks.run(call_everywhere(make_without_sharing, SIZES), limit_seconds=200) == [False] * 4


def test_a_rank_that_cannot_open_what_its_peer_shares_ends_sharing_in_its_group(vllm_ranks: RankProcesses) -> None:
    calls = call_everywhere(make_where_nothing_opens, SIZES, 1)
    found: list[Unshared] = vllm_ranks.run(calls, limit_seconds=200)
    assert [group.shares_memory for group in found] == [False, False, True, True]
    for errors in ([g.error_of_sharing for g in found], [g.error_of_opening_pipes for g in found]):
        reason = (
            f"The KVPP group {FIRST_STAGE} cannot share memory between its processes: rank 1: OSError: not permitted"
        )
        assert all(error is not None and error.startswith(reason) for error in errors[:2])
        assert errors[2:] == [None, None]
