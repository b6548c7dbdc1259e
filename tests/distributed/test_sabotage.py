"""Each way to bring the wrong bytes shows: what the other tests measure can fail."""

import pytest
from multirank.rank_processes import RankProcesses
from multirank.scenarios import Scenario, calls_for, run_with_one_scratch_buffer
from multirank.schedules import decode, prefill_only
from multirank.toy_model import make_layers
from multirank.transports import loses_layer, moves_nothing, strict

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

NUM_LAYERS = 8
LAYERS = make_layers(NUM_LAYERS)


def test_without_transfers_every_rank_computes_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...]
) -> None:
    reports = four_ranks.run(calls_for(Scenario(LAYERS, decode(), group_ranks, moves_nothing)))
    assert all(report.wrong_outputs for report in reports)
    # The first layers' owner computes them rightly; behind the first layer that it lacks all is wrong.
    assert all(report.stale_caches for report in reports[1:])


def test_without_transfers_first_prefills_are_still_right(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...]
) -> None:
    reports = four_ranks.run(calls_for(Scenario(LAYERS, prefill_only(), group_ranks, moves_nothing)))
    assert [report.problems for report in reports] == [[]] * len(group_ranks)


@pytest.mark.parametrize("target_index", range(NUM_LAYERS))
def test_one_lost_layer_makes_the_outputs_of_all_but_its_owner_wrong(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], target_index: int
) -> None:
    prefill, first_decode, *_ = decode()
    scenario = Scenario(LAYERS, (prefill, first_decode), group_ranks, loses_layer(target_index, NUM_LAYERS))
    reports = four_ranks.run(calls_for(scenario))
    right_ranks = [report.group_rank for report in reports if not report.wrong_outputs]
    owners = [report.group_rank for report in reports if target_index in report.owned_layers]
    assert right_ranks == owners


def test_a_single_scratch_buffer_gives_wrong_outputs(four_ranks: RankProcesses, group_ranks: tuple[int, ...]) -> None:
    scenario = Scenario(LAYERS, decode(), group_ranks, strict)
    reports = four_ranks.run(calls_for(scenario, run_with_one_scratch_buffer))
    assert all(report.wrong_outputs for report in reports)


def test_a_wait_behind_the_write_gives_wrong_outputs(four_ranks: RankProcesses, group_ranks: tuple[int, ...]) -> None:
    scenario = Scenario(LAYERS, decode(), group_ranks, strict, waits_after_write=True)
    reports = four_ranks.run(calls_for(scenario))
    assert all(report.wrong_outputs for report in reports)
    assert all("memory was written while its transfer was under way" in report.violations for report in reports)
