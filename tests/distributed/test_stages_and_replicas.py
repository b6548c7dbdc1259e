"""Groups beside each other: pipeline stages and replicas never wait for, or send to, another group (R-RUN-6)."""

from dataclasses import replace

import pytest
from multirank.pipeline import run_stage
from multirank.rank import Call
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario, calls_for, find_problems
from multirank.schedules import NUM_BLOCKS, SCHEDULES, Steps, block_reuse, decode, mixed_batches, prefill_only
from multirank.setups import FULL, PEERS, STAGED, TransferSetup, strict
from multirank.toy_model import make_layers
from multirank.toy_scheduler import Abort, ToyScheduler

from vllm_kvpp.plan import split_into_groups

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


SETUPS = {"staged": STAGED, "peers": PEERS}


@pytest.fixture(params=SETUPS.values(), ids=SETUPS)
def setup(request: pytest.FixtureRequest) -> TransferSetup:
    chosen: TransferSetup = request.param
    return chosen


def make_stages(
    num_first: int, num_second: int, steps: Steps, setup: TransferSetup = FULL
) -> tuple[Scenario, Scenario]:
    """Two stages of two ranks; layer numbers go on in the second, which has the draft layer."""
    first_ranks, second_ranks = split_into_groups(
        4,
        data_parallel_size=1,
        pipeline_parallel_size=2,
        prefill_context_parallel_size=1,
        tensor_parallel_size=2,
    )
    first = Scenario(make_layers(num_first, with_indexer={0}), steps, first_ranks, setup.wrapped(strict))
    layers = make_layers(num_second, first=num_first, with_indexer={num_first}, num_drafts=1)
    return first, Scenario(layers, steps, second_ranks, setup.wrapped(strict))


def calls_for_stages(stages: tuple[Scenario, ...]) -> dict[int, Call]:
    return {world_rank: Call(run_stage, (stages,)) for stage in stages for world_rank in stage.group_ranks}


@pytest.mark.parametrize(("num_first", "num_second"), [(4, 4), (3, 5), (5, 1), (1, 1), (4, 0), (0, 3)])
def test_two_stages_compute_what_the_whole_model_computes(
    four_ranks: RankProcesses, setup: TransferSetup, num_first: int, num_second: int
) -> None:
    stages = make_stages(num_first, num_second, mixed_batches(), setup)
    reports = four_ranks.run(calls_for_stages(stages))
    assert find_problems(reports) == []
    # Four of the five steps have history, and each moves the layers of the rank's own stage.
    assert [report.num_transfers for report in reports] == [4 * num_first] * 2 + [4 * num_second] * 2


def test_each_stage_splits_its_own_layers(four_ranks: RankProcesses) -> None:
    reports = four_ranks.run(calls_for_stages(make_stages(3, 5, ())))
    assert [report.owned_layers for report in reports] == [(0, 1), (2,), (3, 4, 5), (6, 7)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_agree_with_the_reference_in_every_schedule(
    four_ranks: RankProcesses, setup: TransferSetup, schedule: str
) -> None:
    reports = four_ranks.run(calls_for_stages(make_stages(4, 4, SCHEDULES[schedule](), setup)))
    assert find_problems(reports) == []


def test_an_abort_in_the_second_stage_leaves_both_stages_right(four_ranks: RankProcesses, setup: TransferSetup) -> None:
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(9))
    for num_tokens in (5, 4, 1):
        scheduler.step({"a": num_tokens}, Abort(target_index=1, has_waited=True))
        scheduler.step({"a": num_tokens})
    first, second = make_stages(3, 4, tuple(scheduler.steps), setup)
    first = replace(first, steps=tuple(replace(step, abort=None) for step in first.steps))
    assert find_problems(four_ranks.run(calls_for_stages((first, second)))) == []


@pytest.mark.parametrize("idle_steps", [(), prefill_only()], ids=["no_step", "no_history"])
def test_a_replica_works_while_the_other_transfers_nothing(
    four_ranks: RankProcesses, setup: TransferSetup, idle_steps: Steps
) -> None:
    working = Scenario(make_layers(5), block_reuse(), (2, 3), setup)
    idle = Scenario(make_layers(5), idle_steps, (0, 1), setup)
    reports = four_ranks.run(calls_for(working) | calls_for(idle))
    assert find_problems(reports) == []
    assert [report.num_transfers for report in reports] == [0, 0, 4 * 5, 4 * 5]


def test_replicas_with_batches_of_their_own_do_not_disturb_each_other(
    four_ranks: RankProcesses, setup: TransferSetup
) -> None:
    one = Scenario(make_layers(5), decode(), (0, 1), setup)
    other = Scenario(make_layers(5), mixed_batches() * 2, (2, 3), setup)
    assert find_problems(four_ranks.run(calls_for(one) | calls_for(other))) == []
