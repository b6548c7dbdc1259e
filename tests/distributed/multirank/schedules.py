"""The steps of each scenario, by name, and random ones by seed."""

import random
from collections.abc import Callable

from multirank.toy_scheduler import BLOCK_SIZE, Abort, ToyScheduler, ToyStep

NUM_BLOCKS = 24
Steps = tuple[ToyStep, ...]


def prefill_only() -> Steps:
    """New requests only, and a dummy run between them: no forward has history."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(10))
    scheduler.add("b", range(100, 105))
    scheduler.step({"a": 10, "b": 5})
    scheduler.dummy_step()
    scheduler.add("c", range(200, 209))
    scheduler.step({"c": 9})
    return tuple(scheduler.steps)


def decode() -> Steps:
    """Two prompts, then six tokens each; blocks fill up on the way."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(10))
    scheduler.add("b", range(100, 105))
    scheduler.step({"a": 10, "b": 5})
    for _ in range(6):
        scheduler.step({"a": 1, "b": 1})
    return tuple(scheduler.steps)


def chunked_prefill() -> Steps:
    """One prompt in three chunks that end inside blocks, then decode."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(19))
    for num_tokens in (6, 7, 6, 1, 1):
        scheduler.step({"a": num_tokens})
    return tuple(scheduler.steps)


def mixed_batches() -> Steps:
    """Decodes beside a first prefill and beside a later chunk; a request that pauses and goes on."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(9))
    scheduler.add("b", range(100, 117))
    scheduler.step({"a": 9})
    scheduler.step({"a": 1, "b": 6})
    scheduler.step({"b": 5})
    scheduler.step({"b": 6, "a": 1})
    scheduler.step({"a": 1, "b": 1})
    return tuple(scheduler.steps)


def prefix_hit() -> Steps:
    """A new request starts behind blocks that a running one has computed, another behind those of a finished one."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(14))
    scheduler.step({"a": 14})
    scheduler.add("b", [*range(8), 77, 78, 79])
    scheduler.step({"b": 3})
    scheduler.step({"a": 1, "b": 1})
    scheduler.finish("a")
    scheduler.add("c", [*range(12), 88])
    scheduler.step({"c": 1})
    scheduler.step({"b": 1, "c": 1})
    return tuple(scheduler.steps)


def preempt_and_resume() -> Steps:
    """A request loses its blocks twice: once another takes the last of them, once all; it computes what is lost."""
    scheduler = ToyScheduler(num_blocks=8)
    scheduler.add("a", range(10))
    scheduler.add("b", range(100, 107))
    scheduler.step({"a": 10, "b": 7})
    scheduler.step({"a": 1, "b": 1})
    scheduler.preempt("a")
    scheduler.add("c", range(200, 209))
    scheduler.step({"c": 9})
    scheduler.finish("b")
    scheduler.step({"a": 3})
    scheduler.preempt("a")
    scheduler.step({"c": 16})
    scheduler.finish("c")
    for num_tokens in (6, 5, 1):
        scheduler.step({"a": num_tokens})
    return tuple(scheduler.steps)


def block_reuse() -> Steps:
    """A finished request's blocks go to a new one, while another decodes on."""
    scheduler = ToyScheduler(num_blocks=8)
    scheduler.add("a", range(18))
    scheduler.add("b", range(100, 105))
    scheduler.step({"a": 18, "b": 5})
    scheduler.step({"a": 1, "b": 1})
    scheduler.finish("a")
    scheduler.add("c", range(200, 215))
    scheduler.step({"b": 1, "c": 8})
    scheduler.step({"b": 1, "c": 7})
    scheduler.step({"b": 1, "c": 1})
    return tuple(scheduler.steps)


def with_gaps() -> Steps:
    """Three prompts, of which the first and the last go on: their blocks are two runs."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(10))
    scheduler.add("b", range(100, 105))
    scheduler.add("c", range(200, 218))
    scheduler.step({"a": 10, "b": 5, "c": 18})
    for _ in range(3):
        scheduler.step({"a": 1, "c": 1})
    return tuple(scheduler.steps)


def reuse_at_once() -> Steps:
    """A finished request's blocks are written in the very next forward, which has no history; several times over."""
    scheduler = ToyScheduler(num_blocks=4)
    for number in range(6):
        scheduler.add(f"request-{number}", range(100 * number, 100 * number + 10))
        scheduler.step({f"request-{number}": 10})
        scheduler.step({f"request-{number}": 1})
        scheduler.finish(f"request-{number}")
    return tuple(scheduler.steps)


def full_house() -> Steps:
    """Decodes with every block taken."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    scheduler.add("a", range(BLOCK_SIZE * (NUM_BLOCKS - 1) - 3))
    scheduler.step({"a": BLOCK_SIZE * (NUM_BLOCKS - 1) - 3})
    scheduler.step({"a": 1})
    scheduler.step({"a": 1})
    return tuple(scheduler.steps)


SCHEDULES: dict[str, Callable[[], Steps]] = {
    schedule.__name__: schedule
    for schedule in (
        prefill_only,
        decode,
        chunked_prefill,
        mixed_batches,
        prefix_hit,
        preempt_and_resume,
        block_reuse,
        with_gaps,
        reuse_at_once,
        full_house,
    )
}


def random_schedule(generator: random.Random, *, num_target_layers: int, num_steps: int = 30) -> Steps:
    """Requests come, go and are preempted in any order; some forwards abort, some are dummy runs."""
    scheduler = ToyScheduler(NUM_BLOCKS)
    for number in range(num_steps):
        _change_requests(scheduler, generator, number)
        num_tokens = _choose_tokens(scheduler, generator)
        if not num_tokens or generator.random() < 0.1:
            scheduler.dummy_step()
            continue
        abort = None
        if num_target_layers and generator.random() < 0.15:
            abort = Abort(generator.randrange(num_target_layers), has_waited=generator.random() < 0.5)
        scheduler.step(num_tokens, abort)
    return tuple(scheduler.steps)


def _change_requests(scheduler: ToyScheduler, generator: random.Random, number: int) -> None:
    if scheduler.request_ids and generator.random() < 0.15:
        scheduler.finish(generator.choice(scheduler.request_ids))
    if scheduler.request_ids and generator.random() < 0.15:
        scheduler.preempt(generator.choice(scheduler.request_ids))
    if len(scheduler.request_ids) < 4 and generator.random() < 0.5:
        # Few first tokens to choose from, so that prompts share prefixes.
        first = generator.choice((0, 1000))
        scheduler.add(f"request-{number}", range(first, first + generator.randint(1, 20)))


def _choose_tokens(scheduler: ToyScheduler, generator: random.Random) -> dict[str, int]:
    num_tokens: dict[str, int] = {}
    num_blocks_left = scheduler.num_free_blocks
    for request_id in generator.sample(scheduler.request_ids, k=len(scheduler.request_ids)):
        count = generator.randint(1, scheduler.num_uncomputed_tokens(request_id))
        # What it can take at most: its prefix's blocks, its new tokens' blocks, and a block that both touch.
        num_blocks = scheduler.num_uncomputed_tokens(request_id) // BLOCK_SIZE + count // BLOCK_SIZE + 2
        if generator.random() < 0.8 and num_blocks <= num_blocks_left:
            num_tokens[request_id] = count
            num_blocks_left -= num_blocks
    return num_tokens
