"""What a step moves: the blocks of its history and nothing else, or whole bundles (R-RUN-1, R-RUN-2)."""

from collections.abc import Callable

import pytest
from multirank.rank_caches import plan_layers
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Report, Scenario, calls_for, find_problems
from multirank.schedules import (
    NUM_BLOCKS,
    SCHEDULES,
    Steps,
    block_reuse,
    decode,
    full_house,
    preempt_and_resume,
    with_gaps,
)
from multirank.setups import AUTO, FULL, PEERS, PEERS_AUTO, PEERS_FULL, RUNS, STAGED, TransferSetup, strict
from multirank.toy_model import ToyLayer, make_layers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

NUM_LAYERS = 8
LAYERS = make_layers(NUM_LAYERS, with_indexer={2, 5}, num_drafts=1)
NUM_COMPONENTS = NUM_LAYERS + 2
EVERY_LAYER_WITH_INDEXER = make_layers(5, with_indexer=range(5))
# 16 KiB a block, beside which a call costs little.
BIG_PAGES = make_layers(4, row_bytes=4096)


def measure(
    four_ranks: RankProcesses,
    group_ranks: tuple[int, ...],
    layers: tuple[ToyLayer, ...],
    steps: Steps,
    setup: TransferSetup,
) -> Report:
    """Run, and return the report of one rank; all have counted the same, and computed the right thing."""
    reports = four_ranks.run(calls_for(Scenario(layers, steps, group_ranks, setup)))
    assert find_problems(reports) == []
    counts = {
        (report.num_transfers, report.num_transferred_bytes, report.num_transferred_blocks, report.num_calls)
        for report in reports
    }
    assert len(counts) == 1
    first: Report = reports[0]
    return first


def page_size_bytes(layers: tuple[ToyLayer, ...]) -> int:
    """One block of all target layers."""
    return sum(bundle.page_size_bytes for bundle in plan_layers(layers, group_size=2).bundles)


def active_counts(steps: Steps) -> list[int]:
    """The number of active blocks of each step with history, counted from the scheduler's block tables."""
    return [len(step.active_blocks) for step in steps if step.has_history]


def count_runs(steps: Steps) -> int:
    """Runs of active blocks, over all steps: one begins at each block whose predecessor is not active."""
    return sum(block_id - 1 not in step.active_blocks for step in steps for block_id in step.active_blocks)


@pytest.mark.parametrize("setup", [RUNS, STAGED, PEERS], ids=["runs", "staged", "peers"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_active_modes_move_exactly_the_blocks_of_the_history(
    four_ranks: RankProcesses, setup: TransferSetup, schedule: str
) -> None:
    steps = SCHEDULES[schedule]()
    report = measure(four_ranks, (1, 2, 3), LAYERS, steps, setup)
    counts = active_counts(steps)
    assert report.num_transfers == NUM_LAYERS * len(counts)
    assert report.num_transferred_blocks == NUM_LAYERS * sum(counts)
    assert report.num_transferred_bytes == sum(counts) * page_size_bytes(LAYERS)


@pytest.mark.parametrize("setup", [FULL, PEERS_FULL], ids=["full", "peers_full"])
def test_full_mode_moves_whole_bundles(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    report = measure(four_ranks, group_ranks, LAYERS, decode(), setup)
    assert report.num_transfers == 6 * NUM_LAYERS
    assert report.num_transferred_blocks == 6 * NUM_LAYERS * NUM_BLOCKS
    assert report.num_transferred_bytes == 6 * NUM_BLOCKS * page_size_bytes(LAYERS)


@pytest.mark.parametrize("setup", [RUNS, PEERS], ids=["runs", "peers"])
def test_each_run_of_blocks_is_one_call_for_each_component(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    steps = with_gaps()
    report = measure(four_ranks, group_ranks, LAYERS, steps, setup)
    assert count_runs(steps) == 2 * 3
    assert report.num_calls == count_runs(steps) * NUM_COMPONENTS


@pytest.mark.parametrize(("num_staged_blocks", "blocks_per_chunk"), [(1, 1), (1.75, 1), (2, 2), (3.5, 3), (50, 50)])
@pytest.mark.parametrize("schedule", [with_gaps, preempt_and_resume])
def test_staged_blocks_travel_in_as_few_chunks_as_the_memory_allows(
    four_ranks: RankProcesses, num_staged_blocks: float, blocks_per_chunk: int, schedule: Callable[[], Steps]
) -> None:
    steps = schedule()
    setup = TransferSetup("active", num_staged_blocks=num_staged_blocks, wraps=(*STAGED.wraps, strict))
    report = measure(four_ranks, (0, 1, 2, 3), LAYERS, steps, setup)
    assert report.num_calls == NUM_LAYERS * sum(-(-count // blocks_per_chunk) for count in active_counts(steps))
    assert report.num_transferred_bytes == sum(active_counts(steps)) * page_size_bytes(LAYERS)


def test_staging_memory_too_small_for_a_block_is_not_used(four_ranks: RankProcesses) -> None:
    setup = TransferSetup("active", num_staged_blocks=0.9, wraps=STAGED.wraps)
    report = measure(four_ranks, (2, 3), LAYERS, with_gaps(), setup)
    assert report.num_calls == count_runs(with_gaps()) * NUM_COMPONENTS


@pytest.mark.parametrize("setup", [AUTO, PEERS_AUTO], ids=["broadcast", "peers"])
def test_auto_moves_whole_bundles_where_all_blocks_are_active(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    steps = full_house()
    assert active_counts(steps) == [NUM_BLOCKS - 1] * 2
    # They are one run, but of two components a layer, so that one whole range saves a call and costs one small block.
    report = measure(four_ranks, group_ranks, EVERY_LAYER_WITH_INDEXER, steps, setup)
    assert report.num_transferred_blocks == 2 * 5 * NUM_BLOCKS
    assert report.num_transferred_bytes == 2 * NUM_BLOCKS * page_size_bytes(EVERY_LAYER_WITH_INDEXER)


@pytest.mark.parametrize("setup", [AUTO, PEERS_AUTO], ids=["broadcast", "peers"])
@pytest.mark.parametrize("schedule", [decode, block_reuse])
def test_auto_moves_active_blocks_where_they_are_few(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup, schedule: Callable[[], Steps]
) -> None:
    steps = schedule()
    scenario = Scenario(BIG_PAGES, steps, group_ranks, setup, num_blocks=96)
    reports = four_ranks.run(calls_for(scenario))
    assert find_problems(reports) == []
    expected = sum(active_counts(steps)) * page_size_bytes(BIG_PAGES)
    assert {report.num_transferred_bytes for report in reports} == {expected}
