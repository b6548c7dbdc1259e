"""Decode rows that attend to each layer's owner's memory give what they give where every rank keeps every layer."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from multirank.rank_processes import RankProcesses
from multirank.reads import ReadsWrap, late_owner, late_reader
from multirank.scenarios import GROUP_BY_SIZE, Report, Scenario, calls_for, find_problems
from multirank.schedules import SCHEDULES, Steps, decode, mixed_batches, prefill_only, random_schedule, reuse_at_once
from multirank.setups import AT_OWNER, DECODE_SETUPS, IN_PLACE, PEERS, STAGED, DecodeSetup, TransferSetup, strict
from multirank.toy_model import ToyLayer, make_layers

from vllm_kvpp.selection import DecodeMode

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

NUM_LAYERS = 7
LAYERS = make_layers(NUM_LAYERS, num_drafts=1)
SPARSE_LAYERS = make_layers(NUM_LAYERS, with_indexer={0, 3, 6})
LAYERS_BY_KIND = {"dense": LAYERS, "sparse": SPARSE_LAYERS}
GROUPS = tuple(GROUP_BY_SIZE.values())
BY_TRANSPORT = {"peers": PEERS, "gloo": STAGED}
PEERS_IN_PLACE = PEERS.wrapped(strict).with_decode(IN_PLACE)


def combine(index: int, name: str, setup: TransferSetup) -> object:
    """A group of one size, and layers of one kind: without indexers where decode reads in place."""
    group_ranks = GROUPS[index % 3]
    kind = "dense" if index % 2 == 0 or setup.reads_in_place else "sparse"
    return pytest.param(group_ranks, setup, LAYERS_BY_KIND[kind], id=f"{name}-group_of_{len(group_ranks)}-{kind}")


# The random schedules run in all groups.
COMBINATIONS = [combine(index, name, setup) for index, (name, setup) in enumerate(DECODE_SETUPS.items())]


@pytest.fixture(params=BY_TRANSPORT.values(), ids=BY_TRANSPORT)
def transport(request: pytest.FixtureRequest) -> TransferSetup:
    chosen: TransferSetup = request.param
    return chosen


def run(
    four_ranks: RankProcesses,
    group_ranks: tuple[int, ...],
    layers: tuple[ToyLayer, ...],
    steps: Steps,
    setup: TransferSetup,
) -> list[Report]:
    """Run; every rank has computed the right thing, and decided alike."""
    reports: list[Report] = four_ranks.run(calls_for(Scenario(layers, steps, group_ranks, setup)))
    assert find_problems(reports) == []
    decisions = {
        (report.num_steps_at_owner, report.num_steps_in_place, report.num_exchanges, report.num_transfers)
        for report in reports
    }
    assert len(decisions) == 1
    return reports


def list_steps_with_decodes(steps: Steps, setup: DecodeSetup = AT_OWNER) -> Steps:
    """The steps that have history, and requests that decode."""
    return tuple(step for step in steps if step.has_history and setup.list_decodes(step))


def count_moved_blocks(steps: Steps, setup: DecodeSetup = AT_OWNER) -> int:
    """The blocks of a layer that have to move: in steps with decodes those of the others' histories."""
    others = [
        {block_id for request in setup.list_others(step) for block_id in request.history_blocks}
        for step in steps
        if step.has_history
    ]
    return sum(map(len, others))


@pytest.mark.parametrize(("group_ranks", "setup", "layers"), COMBINATIONS)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_outputs_and_kept_caches_equal_the_reference_in_every_schedule(
    four_ranks: RankProcesses,
    group_ranks: tuple[int, ...],
    setup: TransferSetup,
    schedule: Callable[[], Steps],
    layers: tuple[ToyLayer, ...],
) -> None:
    run(four_ranks, group_ranks, layers, schedule(), setup)


@pytest.mark.parametrize("setup_name", DECODE_SETUPS)
def test_random_schedules_agree_with_the_reference(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], setup_name: str
) -> None:
    generator = random.Random(f"{setup_name} {group_ranks}")
    num_layers = generator.randint(1, 10)
    # Half of them dense: with indexers a batch attends at the owners as a whole, or not at all.
    with_indexer = generator.sample(range(num_layers), k=generator.randint(0, num_layers) * generator.randint(0, 1))
    setup = DECODE_SETUPS[setup_name]
    layers = make_layers(
        num_layers,
        with_indexer=() if setup.reads_in_place else with_indexer,
        num_drafts=generator.randint(0, 2),
    )
    steps = random_schedule(generator, num_target_layers=num_layers)
    (report, *_) = run(four_ranks, group_ranks, layers, steps, setup)
    num_by_place = (report.num_steps_in_place, report.num_steps_at_owner)
    assert [num > 0 for num in num_by_place] == [setup.reads_in_place, not setup.reads_in_place]


@pytest.mark.parametrize("layers", LAYERS_BY_KIND.values(), ids=LAYERS_BY_KIND)
def test_steps_that_only_decode_move_no_history(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], transport: TransferSetup, layers: tuple[ToyLayer, ...]
) -> None:
    reports = run(four_ranks, group_ranks, layers, decode(), transport.with_decode(AT_OWNER))
    for report in reports:
        assert (report.num_transfers, report.num_transferred_bytes, report.num_calls) == (0, 0, 0)
        assert (report.num_steps_at_owner, report.num_exchanges) == (6, 6 * NUM_LAYERS)


def test_queries_and_outputs_are_counted_as_they_travel(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], transport: TransferSetup
) -> None:
    reports = run(four_ranks, group_ranks, LAYERS, decode(), transport.with_decode(AT_OWNER))
    for report in reports:
        num_owned, num_peers = len(report.owned_layers), len(group_ranks) - 1
        # Six steps of two rows; of a head two numbers go and one comes, of eight bytes each.
        num_heads = num_owned * num_peers + (NUM_LAYERS - num_owned)
        assert report.num_exchanged_bytes == 6 * 2 * num_heads * 3 * 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_beside_decodes_the_blocks_of_the_other_requests_move_and_no_more(
    four_ranks: RankProcesses, transport: TransferSetup, schedule: str
) -> None:
    steps = SCHEDULES[schedule]()
    (report, *_) = run(four_ranks, (1, 2, 3), LAYERS, steps, transport.with_decode(AT_OWNER))
    assert report.num_transferred_blocks == NUM_LAYERS * count_moved_blocks(steps)
    assert report.num_steps_at_owner == len(list_steps_with_decodes(steps))
    assert report.num_exchanges == NUM_LAYERS * len(list_steps_with_decodes(steps))


def test_with_indexers_a_mixed_batch_moves_all_its_history(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], transport: TransferSetup
) -> None:
    steps = mixed_batches()
    pure = [step for step in list_steps_with_decodes(steps) if not AT_OWNER.list_others(step)]
    (report, *_) = run(four_ranks, group_ranks, SPARSE_LAYERS, steps, transport.with_decode(AT_OWNER))
    assert report.num_steps_at_owner == len(pure) == 1
    moved = [step for step in steps if step.has_history and step not in pure]
    assert report.num_transferred_blocks == NUM_LAYERS * sum(len(step.active_blocks) for step in moved)


def test_more_rows_than_the_exchange_memory_holds_move_their_history(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], transport: TransferSetup
) -> None:
    small = DecodeSetup("owner", most_tokens=12, num_rows=1)
    steps = SCHEDULES["chunked_prefill"]()
    (report, *_) = run(four_ranks, group_ranks, make_layers(3), steps, transport.with_decode(small))
    # Chunks of 7 and 6 tokens do not fit, unless what is allocated is rounded up to that; single tokens do.
    assert report.num_steps_at_owner >= 2


def test_first_prefills_and_dummy_runs_exchange_nothing(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], transport: TransferSetup
) -> None:
    reports = run(four_ranks, group_ranks, LAYERS, prefill_only(), transport.with_decode(AT_OWNER))
    assert {(report.num_exchanges, report.num_transfers) for report in reports} == {(0, 0)}


@pytest.mark.parametrize("setup_name", ["peers_auto", "gloo_auto"])
def test_auto_attends_some_steps_at_the_owner_and_moves_the_history_of_others(
    four_ranks: RankProcesses, setup_name: str
) -> None:
    steps = random_schedule(random.Random(3), num_target_layers=NUM_LAYERS, num_steps=40)
    (report, *_) = run(four_ranks, (1, 2, 3), LAYERS, steps, DECODE_SETUPS[setup_name])
    assert 0 < report.num_steps_at_owner < len(list_steps_with_decodes(steps))


@pytest.mark.parametrize("mode", ["in_place", "auto"])
def test_steps_that_only_decode_in_place_move_and_exchange_nothing(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], mode: DecodeMode
) -> None:
    setup = PEERS.with_decode(replace(IN_PLACE, mode=mode))
    for report in run(four_ranks, group_ranks, LAYERS, decode(), setup):
        assert (report.num_transfers, report.num_transferred_bytes, report.num_calls) == (0, 0, 0)
        assert (report.num_steps_at_owner, report.num_exchanges, report.num_exchanged_bytes) == (0, 0, 0)
        assert (report.num_steps_in_place, report.num_steps_with_transfers) == (6, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_beside_decodes_in_place_the_blocks_of_the_other_requests_move_and_no_more(
    four_ranks: RankProcesses, schedule: str
) -> None:
    steps = SCHEDULES[schedule]()
    (report, *_) = run(four_ranks, (1, 2, 3), LAYERS, steps, PEERS_IN_PLACE)
    assert report.num_transferred_blocks == NUM_LAYERS * count_moved_blocks(steps)
    assert report.num_steps_in_place == len(list_steps_with_decodes(steps))
    assert report.num_exchanges == 0


def test_any_number_of_rows_reads_in_place(four_ranks: RankProcesses, group_ranks: tuple[int, ...]) -> None:
    setup = PEERS.with_decode(replace(IN_PLACE, most_tokens=12))
    (report, *_) = run(four_ranks, group_ranks, LAYERS, SCHEDULES["chunked_prefill"](), setup)
    assert (report.num_steps_in_place, report.num_transfers) == (4, 0)


@pytest.mark.parametrize(("late", "schedule"), [(late_owner, decode), (late_reader, reuse_at_once)])
def test_a_late_owner_and_a_late_reader_are_waited_for(
    four_ranks: RankProcesses, group_ranks: tuple[int, ...], late: ReadsWrap, schedule: Callable[[], Steps]
) -> None:
    setup = PEERS.with_decode(IN_PLACE.with_reads_wrapped(late))
    run(four_ranks, group_ranks, make_layers(4), schedule(), setup)
