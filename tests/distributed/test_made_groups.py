"""The groups that a worker makes, in real processes with vLLM's own types around them (R-RUN-6, R-RUN-7)."""

import pytest
from multirank.made_groups import MadeGroup, make_and_use, probe_dead_transport
from multirank.rank import Call
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario, find_problems
from multirank.schedules import mixed_batches
from multirank.toy_model import make_layers

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

TP_2 = {
    "data_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "tensor_parallel_size": 2,
}
PP_2_TP_2 = TP_2 | {"pipeline_parallel_size": 2}
SCENARIO = Scenario(make_layers(5, with_indexer={1}), mixed_batches(), group_ranks=())


def run_everywhere(size: int, sizes: dict[str, int]) -> tuple[list[MadeGroup], list[str]]:
    """Make groups that work, then groups whose backend is dead, in one set of processes."""
    with RankProcesses(size, groups=[], timeout_seconds=20) as processes:
        made = processes.run({rank: Call(make_and_use, (sizes, SCENARIO)) for rank in range(size)}, limit_seconds=200)
        errors = processes.run({rank: Call(probe_dead_transport, (sizes,)) for rank in range(size)})
    return made, errors


def test_two_ranks_make_one_group_that_works_and_notices_disagreement() -> None:
    made, errors = run_everywhere(2, TP_2)
    assert [(group.ranks, group.rank) for group in made] == [((0, 1), 0), ((0, 1), 1)]
    assert find_problems([group.report for group in made]) == []
    assert [group.error_of_equal_values for group in made] == [None, None]
    disagreement = "The KVPP group of ranks [0, 1] does not agree on the cache plan: rank 0: plan-0, rank 1: plan-1."
    assert [group.error_of_different_values for group in made] == [disagreement] * 2
    assert all("does not deliver: a probe from rank" in error for error in errors)


def test_two_stages_make_a_group_each_that_works_and_notices_disagreement() -> None:
    made, errors = run_everywhere(4, PP_2_TP_2)
    assert [(group.ranks, group.rank) for group in made] == [((0, 1), 0), ((0, 1), 1), ((2, 3), 0), ((2, 3), 1)]
    assert [group.label for group in made] == ["of ranks [0, 1]"] * 2 + ["of ranks [2, 3]"] * 2
    assert find_problems([group.report for group in made]) == []
    assert [group.error_of_equal_values for group in made] == [None] * 4
    first = "The KVPP group of ranks [0, 1] does not agree on the cache plan: rank 0: plan-0, rank 1: plan-1."
    second = "The KVPP group of ranks [2, 3] does not agree on the cache plan: rank 2: plan-2, rank 3: plan-3."
    assert [group.error_of_different_values for group in made] == [first, first, second, second]
    assert "a probe from rank 3 did not arrive" in errors[2]
    assert "a probe from rank 2 did not arrive" in errors[3]
