"""Groups of two, three and four ranks compute what ranks with every layer compute (R-OWN, R-LAY, R-RUN)."""

import pytest
from multirank.rank_caches import plan_layers
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario, calls_for, find_problems
from multirank.schedules import SCHEDULES, Steps, block_reuse, decode, mixed_batches, prefill_only
from multirank.toy_model import ToyLayer, make_layers
from multirank.transports import MakeTransport, broadcast, strict, uneven

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

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


@pytest.fixture(params=[broadcast, strict], ids=lambda make: make.__name__)
def make_transport(request: pytest.FixtureRequest) -> MakeTransport:
    make: MakeTransport = request.param
    return make


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_outputs_and_kept_caches_equal_the_reference_in_every_schedule(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], make_transport: MakeTransport, schedule: object
) -> None:
    assert callable(schedule)
    steps: Steps = schedule()
    scenario = Scenario(make_layers(8), steps, group_ranks, make_transport)
    assert find_problems(four_ranks.run(calls_for(scenario))) == []


@pytest.mark.parametrize("layers", LAYERS_BY_SHAPE.values(), ids=LAYERS_BY_SHAPE)
def test_outputs_and_kept_caches_equal_the_reference_for_every_shape_of_stage(
    four_ranks: RankProcesses,
    group_ranks: tuple[int, ...],
    make_transport: MakeTransport,
    layers: tuple[ToyLayer, ...],
) -> None:
    scenario = Scenario(layers, mixed_batches(), group_ranks, make_transport)
    assert find_problems(four_ranks.run(calls_for(scenario))) == []


def test_layers_of_a_mebibyte_arrive_whole(four_ranks: RankProcesses, group_ranks: tuple[int, ...]) -> None:
    layers = make_layers(5, row_bytes=576, with_indexer={2})
    scenario = Scenario(layers, decode(), group_ranks, num_blocks=512)
    assert find_problems(four_ranks.run(calls_for(scenario))) == []


def test_ranks_of_uneven_speed_agree_with_the_reference(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...]
) -> None:
    scenario = Scenario(make_layers(7), mixed_batches() + block_reuse(), group_ranks, uneven)
    assert find_problems(four_ranks.run(calls_for(scenario))) == []


def test_first_prefills_and_dummy_runs_move_nothing(four_ranks: RankProcesses, group_ranks: tuple[int, ...]) -> None:
    reports = four_ranks.run(calls_for(Scenario(make_layers(8), prefill_only(), group_ranks)))
    assert find_problems(reports) == []
    assert {(report.num_transfers, report.num_transferred_bytes) for report in reports} == {(0, 0)}
    assert {report.num_steps_with_history for report in reports} == {0}


def test_a_forward_with_history_moves_every_layer_once(four_ranks: RankProcesses, group_ranks: tuple[int, ...]) -> None:
    layers = make_layers(8, with_indexer={2}, num_drafts=1)
    scenario = Scenario(layers, decode(), group_ranks)
    reports = four_ranks.run(calls_for(scenario))
    targets = plan_layers(layers, group_size=len(group_ranks)).bundles
    whole_bundles = 6 * scenario.num_blocks * sum(bundle.page_size_bytes for bundle in targets)
    assert {report.num_steps_with_history for report in reports} == {6}
    assert {report.num_transfers for report in reports} == {6 * 8}
    assert len({report.num_transferred_bytes for report in reports}) == 1
    assert 0 < reports[0].num_transferred_bytes <= whole_bundles


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
