"""Run a scenario on one rank of a group, beside the reference, and report every difference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch

from multirank.rank import Call, Rank
from multirank.rank_caches import FullCaches, KVPPCaches
from multirank.schedules import NUM_BLOCKS
from multirank.setups import FULL, TransferSetup
from multirank.toy_group import Group, ToyGroup
from multirank.toy_model import Hidden, ToyLayer, embed
from multirank.toy_scheduler import ToyStep
from vllm_kvpp.errors import KVPPOrderError

# World ranks of a group of each size among four. Wherever it can it begins behind world rank 0: a rank of the group is
# not the rank of the world.
GROUP_BY_SIZE = {2: (2, 3), 3: (1, 2, 3), 4: (0, 1, 2, 3)}


@dataclass(frozen=True)
class Scenario:
    """What one group runs; `limit_seconds` for a transfer where it is not that of the process groups."""

    layers: tuple[ToyLayer, ...]
    steps: tuple[ToyStep, ...]
    group_ranks: tuple[int, ...]
    setup: TransferSetup = FULL
    num_blocks: int = NUM_BLOCKS
    waits_after_write: bool = False
    limit_seconds: float | None = None


@dataclass(frozen=True)
class Report:
    """What one rank saw; `problems` is empty when all is right."""

    group_rank: int
    owned_layers: tuple[int, ...]
    wrong_outputs: tuple[str, ...]
    stale_caches: tuple[str, ...]
    violations: tuple[str, ...]
    num_transfers: int
    num_transferred_bytes: int
    num_transferred_blocks: int
    num_calls: int
    num_steps_with_history: int
    num_steps_with_transfers: int
    num_steps_at_owner: int
    num_steps_in_place: int
    num_exchanges: int
    num_exchanged_bytes: int

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong, with the rank."""
        found = (*self.wrong_outputs, *self.stale_caches, *self.violations)
        return [f"group rank {self.group_rank}: {problem}" for problem in found]


def calls_for(scenario: Scenario, function: Callable[[Rank, Scenario], object] | None = None) -> dict[int, Call]:
    """The calls that run a scenario on every rank of its group."""
    return {world_rank: Call(function or run_scenario, (scenario,)) for world_rank in scenario.group_ranks}


def find_problems(reports: Sequence[Report]) -> list[str]:
    """Everything that is wrong on any rank."""
    return [problem for report in reports for problem in report.problems]


def run_scenario(rank: Rank, scenario: Scenario) -> Report:
    """Run all steps on this rank, which is in the scenario's group."""
    return run_on_group(scenario, make_group(rank, scenario))


def run_and_stay(rank: Rank, scenario: Scenario) -> Report:
    """Run all steps on this rank, and keep its memory and pipes until every rank of the group is done."""
    group = make_group(rank, scenario)
    caches = make_caches(scenario, group)
    report = run_on_caches(scenario, caches)
    group.gather("done")
    return report


def run_with_one_scratch_buffer(rank: Rank, scenario: Scenario) -> Report:
    """Run it broken: every layer of another rank is received in scratch buffer 0."""
    with patch("vllm_kvpp.plan.placement.scratch_index", return_value=0):
        return run_scenario(rank, scenario)


def run_past_hooks(rank: Rank, scenario: Scenario) -> tuple[list[str], Report]:
    """Run the scenario's steps on a model that passes one layer's hook by, each layer in turn; then run them right.

    Returns the errors, one a broken step with history, and the report of the right steps.
    """
    caches = make_caches(scenario, make_group(rank, scenario))
    reference = FullCaches(scenario.layers, scenario.num_blocks)
    before_layer = caches.transfers.before_layer
    wrong_outputs: list[str] = []
    errors: list[str] = []
    for index, scheduled in enumerate(scenario.steps):
        step = scheduled
        for layer in scenario.layers if step.has_history else ():
            skipped = {cache.name for cache in layer.caches}
            with patch.object(
                caches.transfers, "before_layer", lambda name, to=skipped: name in to or before_layer(name)
            ):
                errors.append(_find_order_error(caches, step))
            step = step.repeat()
        hidden = embed(step)
        wrong_outputs += find_wrong_outputs(index, caches.run(step, hidden), reference.run(step, hidden))
    return errors, make_report(caches, reference, wrong_outputs, caches.find_left_under_way())


def _find_order_error(caches: KVPPCaches, step: ToyStep) -> str:
    try:
        caches.run(step, embed(step))
    except KVPPOrderError as error:
        return str(error)
    return "no error"


def run_on_group(scenario: Scenario, group: Group) -> Report:
    """Run all steps on a group made by the caller."""
    return run_on_caches(scenario, make_caches(scenario, group))


def run_on_caches(scenario: Scenario, caches: KVPPCaches) -> Report:
    """Run all steps on one rank's caches, and on the reference."""
    reference = FullCaches(scenario.layers, scenario.num_blocks)
    wrong_outputs: list[str] = []
    violations: list[str] = []
    for index, step in enumerate(scenario.steps):
        hidden = embed(step)
        found, expected = caches.run(step, hidden), reference.run(step, hidden)
        wrong_outputs += find_wrong_outputs(index, found, expected)
        violations += caches.find_left_under_way()
    return make_report(caches, reference, wrong_outputs, violations)


def make_group(rank: Rank, scenario: Scenario) -> ToyGroup:
    """The scenario's group, for this rank."""
    return ToyGroup(
        ranks=scenario.group_ranks,
        rank=scenario.group_ranks.index(rank.world_rank),
        data=rank.groups[scenario.group_ranks],
        queries=rank.query_groups[scenario.group_ranks],
        timeout_seconds=scenario.limit_seconds or rank.timeout_seconds,
        make_signals=scenario.setup.make_signals,
    )


def make_caches(scenario: Scenario, group: Group) -> KVPPCaches:
    """This rank's caches, as KVPP plans them. Collective if the setup shares memory."""
    return KVPPCaches(
        scenario.layers,
        scenario.num_blocks,
        group=group,
        setup=scenario.setup,
        waits_after_write=scenario.waits_after_write,
    )


def find_wrong_outputs(step_index: int, found: Hidden | None, expected: Hidden | None) -> list[str]:
    """The requests whose outputs are not exactly the reference's."""
    if found is None or expected is None:
        return [] if found is expected else [f"step {step_index}: one of both forwards aborted"]
    return [
        f"step {step_index}: the output of request {request_id} is wrong"
        for request_id in expected
        if not torch.equal(found[request_id], expected[request_id])
    ]


def make_report(
    caches: KVPPCaches, reference: FullCaches, wrong_outputs: Sequence[str], violations: Sequence[str]
) -> Report:
    """Gather what there is to say at the end."""
    seen = [violation for transport in caches.strict_transports for violation in transport.violations]
    counters = caches.transfers.counters
    return Report(
        group_rank=caches.group_rank,
        owned_layers=caches.owned_layers,
        wrong_outputs=tuple(wrong_outputs),
        stale_caches=tuple(f"the kept cache {name} is wrong" for name in caches.find_stale_caches(reference)),
        violations=(*violations, *seen, *caches.violations),
        num_transfers=counters.transfers,
        num_transferred_bytes=counters.transferred_bytes,
        num_transferred_blocks=counters.transferred_blocks,
        num_calls=counters.calls,
        num_steps_with_history=counters.steps_with_history,
        num_steps_with_transfers=counters.steps_with_transfers,
        num_steps_at_owner=counters.steps_at_owner,
        num_steps_in_place=counters.steps_in_place,
        num_exchanges=counters.exchanges,
        num_exchanged_bytes=counters.query_bytes + counters.output_bytes,
    )
