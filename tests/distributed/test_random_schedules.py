"""Whatever comes in whatever order, all ranks compute what ranks with every layer compute."""

import random

import pytest
from multirank.rank_processes import RankProcesses
from multirank.scenarios import GROUP_BY_SIZE, Scenario, calls_for, find_problems
from multirank.schedules import random_schedule
from multirank.setups import SETUPS
from multirank.toy_model import make_layers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("setup_name", SETUPS)
def test_random_schedules_agree_with_the_reference(four_ranks: RankProcesses, setup_name: str, seed: int) -> None:
    generator = random.Random(f"{setup_name} {seed}")
    group_ranks = generator.choice(list(GROUP_BY_SIZE.values()))
    num_layers = generator.randint(1, 10)
    with_indexer = generator.sample(range(num_layers), k=generator.randint(0, num_layers))
    layers = make_layers(num_layers, with_indexer=with_indexer, num_drafts=generator.randint(0, 2))
    steps = random_schedule(generator, num_target_layers=num_layers)
    scenario = Scenario(layers, steps, group_ranks, SETUPS[setup_name])
    assert find_problems(four_ranks.run(calls_for(scenario))) == []
