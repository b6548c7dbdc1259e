"""Each way to bring the wrong bytes shows: what the other tests measure can fail."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from multirank.broken_transports import drop_run, lose_layer, move_nothing, spoil_piece
from multirank.exchanges import forget_choices, swap_heads
from multirank.rank_processes import RankProcesses
from multirank.reads import hasty_owner, hasty_reader, late_owner, late_reader
from multirank.scenarios import Scenario, calls_for, run_and_stay, run_with_one_scratch_buffer
from multirank.schedules import Steps, decode, prefill_only, reuse_at_once, with_gaps
from multirank.setups import AT_OWNER, FULL, IN_PLACE, PEERS, PEERS_DEAF, RUNS, STAGED, TransferSetup, strict
from multirank.toy_model import make_layers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

NUM_LAYERS = 8
LAYERS = make_layers(NUM_LAYERS)
WITH_INDEXER = make_layers(NUM_LAYERS, with_indexer={3})
SETUPS = {"full": FULL, "staged": STAGED, "peers": PEERS}
ACTIVE_SETUPS = {"runs": RUNS, "staged": STAGED, "peers": PEERS}


@pytest.fixture(params=SETUPS.values(), ids=SETUPS)
def setup(request: pytest.FixtureRequest) -> TransferSetup:
    chosen: TransferSetup = request.param
    return chosen


def test_without_transfers_every_rank_computes_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    reports = four_ranks.run(calls_for(Scenario(LAYERS, decode(), group_ranks, setup.wrapped(move_nothing))))
    assert all(report.wrong_outputs for report in reports)
    # The first layers' owner computes them rightly; behind the first layer that it lacks all is wrong.
    assert all(report.stale_caches for report in reports[1:])


def test_without_transfers_first_prefills_are_still_right(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...]
) -> None:
    reports = four_ranks.run(calls_for(Scenario(LAYERS, prefill_only(), group_ranks, FULL.wrapped(move_nothing))))
    assert [report.problems for report in reports] == [[]] * len(group_ranks)


@pytest.mark.parametrize("target_index", range(NUM_LAYERS))
def test_one_lost_layer_makes_the_outputs_of_all_but_its_owner_wrong(
    four_ranks: RankProcesses, setup: TransferSetup, target_index: int
) -> None:
    prefill, first_decode, *_ = decode()
    broken = setup.wrapped(lose_layer(target_index, NUM_LAYERS))
    reports = four_ranks.run(calls_for(Scenario(LAYERS, (prefill, first_decode), (0, 1, 2, 3), broken)))
    right_ranks = [report.group_rank for report in reports if not report.wrong_outputs]
    owners = [report.group_rank for report in reports if target_index in report.owned_layers]
    assert right_ranks == owners


@pytest.mark.parametrize("setup", ACTIVE_SETUPS.values(), ids=ACTIVE_SETUPS)
@pytest.mark.parametrize(("run_index", "request_id"), [(0, "a"), (1, "c")])
def test_one_lost_run_of_blocks_makes_the_outputs_of_its_request_wrong(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup, run_index: int, request_id: str
) -> None:
    broken = setup.wrapped(drop_run(run_index), strict)
    reports = four_ranks.run(calls_for(Scenario(LAYERS, with_gaps(), group_ranks, broken)))
    expected = tuple(f"step {step}: the output of request {request_id} is wrong" for step in (1, 2, 3))
    assert [report.wrong_outputs for report in reports] == [expected] * len(group_ranks)


@pytest.mark.parametrize("component_index", [0, 1], ids=["main", "indexer"])
@pytest.mark.parametrize(("block_index", "request_id"), [(0, "a"), (2, "a"), (3, "c"), (7, "c")])
def test_one_lost_block_of_one_component_makes_the_outputs_of_its_request_wrong(
    four_ranks: RankProcesses, setup: TransferSetup, component_index: int, block_index: int, request_id: str
) -> None:
    broken = setup.wrapped(spoil_piece(3, component_index, block_index, NUM_LAYERS))
    reports = four_ranks.run(calls_for(Scenario(WITH_INDEXER, with_gaps()[:2], (1, 2, 3), broken)))
    for report in reports:
        wrong = () if 3 in report.owned_layers else (f"step 1: the output of request {request_id} is wrong",)
        assert report.wrong_outputs == wrong


def test_a_single_scratch_buffer_gives_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    scenario = Scenario(LAYERS, decode(), group_ranks, setup.wrapped(strict))
    reports = four_ranks.run(calls_for(scenario, run_with_one_scratch_buffer))
    assert all(report.wrong_outputs for report in reports)


def test_a_wait_behind_the_write_is_noticed(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    scenario = Scenario(LAYERS, decode(), group_ranks, setup.wrapped(strict), waits_after_write=True)
    reports = four_ranks.run(calls_for(scenario))
    assert all("memory was written while its transfer was under way" in report.violations for report in reports)
    # Peers may still read what the owner has just written, which is what they would have written themselves.
    assert setup is PEERS or all(report.wrong_outputs for report in reports)


@pytest.mark.parametrize("schedule", [decode, reuse_at_once])
def test_peer_copies_that_wait_for_nobody_give_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], schedule: Callable[[], Steps]
) -> None:
    scenario = Scenario(LAYERS, schedule(), group_ranks, PEERS_DEAF)
    reports = four_ranks.run(calls_for(scenario, run_and_stay))
    assert any(report.wrong_outputs for report in reports)


AT_OWNER_SETUPS = {"peers": PEERS, "gloo": STAGED}


@pytest.mark.parametrize("setup", AT_OWNER_SETUPS.values(), ids=AT_OWNER_SETUPS)
def test_decode_rows_that_attend_their_own_scratch_buffer_give_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    broken = setup.with_decode(replace(AT_OWNER, attends_here=True))
    reports = four_ranks.run(calls_for(Scenario(LAYERS, decode()[:2], group_ranks, broken)))
    assert all(report.wrong_outputs for report in reports)


@pytest.mark.parametrize("setup", AT_OWNER_SETUPS.values(), ids=AT_OWNER_SETUPS)
def test_an_owner_that_swaps_heads_gives_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup: TransferSetup
) -> None:
    broken = setup.with_decode(AT_OWNER.wrapped(swap_heads))
    reports = four_ranks.run(calls_for(Scenario(LAYERS, decode()[:2], group_ranks, broken)))
    assert all(report.wrong_outputs for report in reports)


@pytest.mark.parametrize("setup", AT_OWNER_SETUPS.values(), ids=AT_OWNER_SETUPS)
def test_choices_that_are_not_shared_make_the_outputs_of_all_but_the_indexers_owner_wrong(
    four_ranks: RankProcesses, setup: TransferSetup
) -> None:
    broken = setup.with_decode(AT_OWNER.wrapped(forget_choices))
    # The indexer is in the last layer.
    layers = make_layers(4, with_indexer={3})
    reports = four_ranks.run(calls_for(Scenario(layers, decode()[:2], (1, 2, 3), broken)))
    assert [report.group_rank for report in reports if not report.wrong_outputs] == [2]


def test_an_exchange_that_waits_for_nobody_gives_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...]
) -> None:
    scenario = Scenario(LAYERS, decode(), group_ranks, PEERS_DEAF.with_decode(AT_OWNER))
    reports = four_ranks.run(calls_for(scenario, run_and_stay))
    assert any(report.wrong_outputs for report in reports)


def test_decode_rows_that_read_their_own_memory_in_place_give_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...]
) -> None:
    broken = PEERS.with_decode(replace(IN_PLACE, attends_here=True))
    reports = four_ranks.run(calls_for(Scenario(LAYERS, decode()[:2], group_ranks, broken)))
    assert all(report.wrong_outputs for report in reports)


def test_readers_that_do_not_wait_for_a_late_owner_give_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...]
) -> None:
    broken = PEERS.with_decode(IN_PLACE.with_reads_wrapped(hasty_reader, late_owner))
    reports = four_ranks.run(calls_for(Scenario(LAYERS, decode(), group_ranks, broken)))
    # All but the late one, which finds what the others have made of it.
    assert all(report.wrong_outputs for report in reports[1:])


def test_owners_that_do_not_wait_for_a_late_reader_give_wrong_outputs(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...]
) -> None:
    broken = PEERS.with_decode(IN_PLACE.with_reads_wrapped(hasty_owner, late_reader))
    reports = four_ranks.run(calls_for(Scenario(make_layers(4), reuse_at_once(), group_ranks, broken)))
    assert [report.group_rank for report in reports if report.wrong_outputs][:1] == [0]
