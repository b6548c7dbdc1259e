"""Whatever comes in whatever order, all ranks compute what ranks with every layer compute."""

import random

import pytest
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario, calls_for, find_problems
from multirank.schedules import random_schedule
from multirank.toy_model import make_layers
from multirank.transports import broadcast, strict

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_agree_with_the_reference(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], seed: int
) -> None:
    generator = random.Random(seed)
    num_layers = generator.randint(1, 10)
    with_indexer = generator.sample(range(num_layers), k=generator.randint(0, num_layers))
    layers = make_layers(num_layers, with_indexer=with_indexer, num_drafts=generator.randint(0, 2))
    steps = random_schedule(generator, num_target_layers=num_layers)
    scenario = Scenario(layers, steps, group_ranks, generator.choice([broadcast, strict]))
    assert find_problems(four_ranks.run(calls_for(scenario))) == []
