"""Groups of two, three and four ranks compute what ranks with every layer compute (R-OWN, R-LAY, R-RUN)."""

from collections.abc import Callable

import pytest
from multirank.rank_processes import RankProcesses
from multirank.scenarios import GROUP_BY_SIZE, Scenario, calls_for, find_problems
from multirank.schedules import SCHEDULES, Steps, block_reuse, decode, mixed_batches, prefill_only
from multirank.setups import FULL, PEERS, SETUPS, STAGED, TransferSetup, uneven
from multirank.toy_model import ToyLayer, make_layers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

GROUPS = tuple(GROUP_BY_SIZE.values())
# Those that differ most run in groups of every size, the others in one.
IN_EVERY_GROUP = ("staged_strict", "peers_strict")
COMBINATIONS = [
    pytest.param(group_ranks, setup, id=f"{name}-group_of_{len(group_ranks)}")
    for index, (name, setup) in enumerate(SETUPS.items())
    for group_ranks in (GROUPS if name in IN_EVERY_GROUP else GROUPS[index % 3 :][:1])
]
FEW_COMBINATIONS = [
    combination
    for combination in COMBINATIONS
    if str(combination.id).startswith((*IN_EVERY_GROUP, "full_strict", "peers_uneven"))
]

LAYERS_BY_SHAPE = {
    "1_layer": make_layers(1),
    "2_layers": make_layers(2),
    "3_layers": make_layers(3),
    "7_layers": make_layers(7),
    "13_layers_from_7": make_layers(13, first=7),
    "indexer_everywhere": make_layers(5, with_indexer=range(5)),
    "indexer_on_some": make_layers(8, with_indexer={0, 3, 4, 7}),
    "1_draft": make_layers(6, num_drafts=1),
    "indexer_and_2_drafts": make_layers(6, with_indexer={1, 5, 6}, num_drafts=2),
    "drafts_only": make_layers(0, num_drafts=2),
}


@pytest.mark.parametrize(("group_ranks", "setup"), COMBINATIONS)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_outputs_and_kept_caches_equal_the_reference_in_every_schedule(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup, schedule: Callable[[], Steps]
) -> None:
    scenario = Scenario(make_layers(8, with_indexer={1, 6}), schedule(), group_ranks, setup)
    assert find_problems(four_ranks.run(calls_for(scenario))) == []


@pytest.mark.parametrize(("group_ranks", "setup"), FEW_COMBINATIONS)
@pytest.mark.parametrize("layers", LAYERS_BY_SHAPE.values(), ids=LAYERS_BY_SHAPE)
def test_outputs_and_kept_caches_equal_the_reference_for_every_shape_of_stage(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup, layers: tuple[ToyLayer, ...]
) -> None:
    scenario = Scenario(layers, mixed_batches(), group_ranks, setup)
    assert find_problems(four_ranks.run(calls_for(scenario))) == []


@pytest.mark.parametrize("setup", [FULL, STAGED, PEERS], ids=["full", "staged", "peers"])
def test_layers_of_a_mebibyte_arrive_whole(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    layers = make_layers(5, row_bytes=576, with_indexer={2})
    scenario = Scenario(layers, decode(), group_ranks, setup, num_blocks=512)
    assert find_problems(four_ranks.run(calls_for(scenario))) == []


@pytest.mark.parametrize("setup", [FULL, STAGED, PEERS], ids=["full", "staged", "peers"])
def test_ranks_of_uneven_speed_agree_with_the_reference(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    scenario = Scenario(make_layers(7), mixed_batches() + block_reuse(), group_ranks, setup.wrapped(uneven))
    assert find_problems(four_ranks.run(calls_for(scenario))) == []


@pytest.mark.parametrize("setup", [FULL, STAGED, PEERS], ids=["full", "staged", "peers"])
def test_first_prefills_and_dummy_runs_move_nothing(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    reports = four_ranks.run(calls_for(Scenario(make_layers(8), prefill_only(), group_ranks, setup)))
    assert find_problems(reports) == []
    assert {(report.num_transfers, report.num_transferred_bytes) for report in reports} == {(0, 0)}
    assert {report.num_steps_with_history for report in reports} == {0}


@pytest.mark.parametrize(
    ("num_layers", "owned_by_size"),
    [
        (2, {2: [(0,), (1,)], 3: [(0,), (1,), ()], 4: [(0,), (1,), (), ()]}),
        (7, {2: [(0, 1, 2, 3), (4, 5, 6)], 3: [(0, 1, 2), (3, 4), (5, 6)], 4: [(0, 1), (2, 3), (4, 5), (6,)]}),
    ],
)
def test_ranks_own_balanced_ranges_of_layers(
    four_ranks: RankProcesses,
    group_ranks: tuple[int, ...],
    num_layers: int,
    owned_by_size: dict[int, list[tuple[int, ...]]],
) -> None:
    reports = four_ranks.run(calls_for(Scenario(make_layers(num_layers), (), group_ranks)))
    assert [report.owned_layers for report in reports] == owned_by_size[len(group_ranks)]
