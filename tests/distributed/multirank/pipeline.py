"""Run one pipeline stage on one rank: hidden states come from the stage before and go to the stage behind."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from multirank.rank import Rank
from multirank.rank_caches import FullCaches
from multirank.scenarios import Report, Scenario, find_wrong_outputs, make_caches, make_group, make_report
from multirank.toy_model import Hidden, embed
from multirank.toy_scheduler import ToyStep


def run_stage(rank: Rank, stages: Sequence[Scenario]) -> Report:
    """Run this rank's stage of a pipeline; `stages` have the same batches and a group of the same size each.

    As in vLLM, a rank sends its hidden states to the rank of the same place in the next stage.
    """
    (index,) = (index for index, stage in enumerate(stages) if rank.world_rank in stage.group_ranks)
    caches = make_caches(stages[index], make_group(rank, stages[index]))
    references = [FullCaches(stage.layers, stage.num_blocks) for stage in stages]
    wrong_outputs: list[str] = []
    violations: list[str] = []
    for step_index, step in enumerate(stages[index].steps):
        hidden = embed(step) if index == 0 else _receive(step, stages[index - 1].group_ranks[caches.group_rank])
        found = caches.run(step, hidden)
        if index + 1 < len(stages):
            assert found is not None, "a stage that aborts leaves the next one without input"
            _send(step, found, stages[index + 1].group_ranks[caches.group_rank])
        expected = _run_references(references[: index + 1], stages, step_index)
        wrong_outputs += find_wrong_outputs(step_index, found, expected)
        violations += caches.find_left_under_way()
    return make_report(caches, references[index], wrong_outputs, violations)


def _run_references(references: Sequence[FullCaches], stages: Sequence[Scenario], step_index: int) -> Hidden | None:
    hidden: Hidden | None = embed(stages[0].steps[step_index])
    for reference, stage in zip(references, stages, strict=False):
        assert hidden is not None
        hidden = reference.run(stage.steps[step_index], hidden)
    return hidden


def _send(step: ToyStep, hidden: Hidden, world_rank: int) -> None:
    dist.send(torch.cat([hidden[request.request_id] for request in step.requests]), dst=world_rank)


def _receive(step: ToyStep, world_rank: int) -> Hidden:
    lengths = [len(request.token_ids) for request in step.requests]
    received = torch.empty(sum(lengths), dtype=torch.int64)
    dist.recv(received, src=world_rank)
    request_ids = [request.request_id for request in step.requests]
    return dict(zip(request_ids, received.split(lengths), strict=True))
