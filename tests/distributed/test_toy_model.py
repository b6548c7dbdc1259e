"""The yardstick itself: the reference is right, and one wrong byte shows."""

import random

import pytest
import torch
from multirank.rank_caches import FullCaches
from multirank.schedules import NUM_BLOCKS, SCHEDULES, Steps, random_schedule
from multirank.toy_model import Hidden, ToyLayer, embed, make_layers
from multirank.toy_scheduler import ScheduledRequest, ToyStep

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

LAYERS = make_layers(3, with_indexer={1}, num_drafts=1)


def compute_from_tokens(layers: tuple[ToyLayer, ...], request: ScheduledRequest, tokens: list[int]) -> torch.Tensor:
    """The request's outputs without any history: all its tokens at once, in blocks of its own."""
    whole = ToyStep((ScheduledRequest(request.request_id, tuple(tokens), 0, tuple(range(1, NUM_BLOCKS))),))
    output = FullCaches(layers, NUM_BLOCKS).run(whole, embed(whole))
    assert output is not None
    return output[request.request_id][request.num_computed_tokens :]


def find_unexpected_outputs(steps: Steps, prompts: dict[str, list[int]]) -> list[str]:
    caches = FullCaches(LAYERS, NUM_BLOCKS)
    unexpected: list[str] = []
    for index, step in enumerate(steps):
        output: Hidden | None = caches.run(step, embed(step))
        for request in step.requests if output is not None else ():
            tokens = prompts.setdefault(request.request_id, [])
            tokens[request.num_computed_tokens :] = request.token_ids
            if not torch.equal(output[request.request_id], compute_from_tokens(LAYERS, request, tokens)):
                unexpected.append(f"step {index}, request {request.request_id}")
    return unexpected


@pytest.mark.parametrize("name", SCHEDULES.keys() - {"prefix_hit"})
def test_the_reference_with_blocks_computes_what_whole_prompts_give(name: str) -> None:
    assert find_unexpected_outputs(SCHEDULES[name](), {}) == []


def test_the_reference_with_prefix_hits_computes_what_whole_prompts_give() -> None:
    prompts = {"b": list(range(8)), "c": list(range(12))}
    assert find_unexpected_outputs(SCHEDULES["prefix_hit"](), prompts) == []


@pytest.mark.parametrize("layer_index", range(len(LAYERS)))
def test_one_wrong_byte_of_the_history_changes_the_output(layer_index: int) -> None:
    prefill, decode, *_ = SCHEDULES["decode"]()
    for cache in LAYERS[layer_index].caches:
        for byte in range(cache.row_bytes):
            caches, damaged = FullCaches(LAYERS, NUM_BLOCKS), FullCaches(LAYERS, NUM_BLOCKS)
            caches.run(prefill, embed(prefill))
            damaged.run(prefill, embed(prefill))
            damaged.rows[cache.name][prefill.requests[0].block_table[0], 0, byte] ^= 1
            right, wrong = caches.run(decode, embed(decode)), damaged.run(decode, embed(decode))
            assert right is not None
            assert wrong is not None
            assert not torch.equal(right["a"], wrong["a"])
            assert torch.equal(right["b"], wrong["b"])


def test_a_prefix_hit_begins_with_computed_tokens() -> None:
    first_steps = {r.request_id: r for step in reversed(SCHEDULES["prefix_hit"]()) for r in step.requests}
    assert {name: r.num_computed_tokens for name, r in first_steps.items()} == {"a": 0, "b": 8, "c": 12}
    assert first_steps["a"].block_table[:2] == first_steps["b"].block_table[:2] == first_steps["c"].block_table[:2]


def test_a_preempted_request_resumes_behind_what_is_left_of_its_blocks() -> None:
    runs = [request for step in SCHEDULES["preempt_and_resume"]() for request in step.requests]
    assert [r.num_computed_tokens for r in runs if r.request_id == "a"] == [0, 10, 8, 0, 6, 11]
    assert len({r.block_table for r in runs if r.request_id == "a" and r.num_computed_tokens in (8, 10)}) == 2


def test_a_new_request_gets_blocks_of_a_finished_one() -> None:
    steps = SCHEDULES["block_reuse"]()
    finished, new = steps[1].requests[0], steps[-1].requests[1]
    assert (finished.request_id, new.request_id) == ("a", "c")
    assert set(finished.block_table) & set(new.block_table)


def test_random_schedules_hold_every_kind_of_step() -> None:
    steps = [step for seed in range(8) for step in random_schedule(random.Random(seed), num_target_layers=4)]
    scheduled = [step for step in steps if not step.is_dummy]
    assert any(step.is_dummy for step in steps)
    assert {step.has_history for step in scheduled} == {True, False}
    assert {step.abort.has_waited for step in scheduled if step.abort} == {True, False}
    assert any(len({r.num_computed_tokens > 0 for r in step.requests}) == 2 for step in scheduled)
    assert any(len(request.block_table) >= 4 for step in scheduled for request in step.requests)
