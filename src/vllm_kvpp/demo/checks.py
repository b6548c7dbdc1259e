"""The demo's claims, each held against what was measured."""

from collections.abc import Iterator, Sequence

from vllm_kvpp.demo.client import Answer
from vllm_kvpp.demo.results import DemoResult, RankReport

MIN_ACCURACY = 0.95
# Broken transfers have to spoil most answers, not just some.
MAX_BROKEN_SHARE = 0.5
BLOCK_TOLERANCE = 1
# Two servers may batch the same requests differently, which changes float32 sums in their last digits. Wrong KV is
# orders of magnitude off.
LOGPROB_TOLERANCE = 1e-3


def find_problems(result: DemoResult) -> tuple[str, ...]:
    """List every claim that does not hold; empty means that all do."""
    return (
        *_check_capacity(result),
        *_check_memory(result),
        *_check_accuracy(result),
        *_check_equal_answers(result),
        *_check_control(result),
        *_check_transfers(result),
    )


def count_differing(ours: Sequence[Answer], theirs: Sequence[Answer]) -> int:
    """Answers whose text or token ids are not the same."""
    pairs = zip(ours, theirs, strict=True)
    return sum(mine.text != other.text or mine.token_ids != other.token_ids for mine, other in pairs)


def find_largest_logprob_difference(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """The largest difference between two tokens' log probabilities, at the same place in the same answer."""
    return max(
        abs(mine - other)
        for answer, counterpart in zip(ours, theirs, strict=True)
        for mine, other in zip(answer.logprobs, counterpart.logprobs, strict=True)
    )


def _check_capacity(result: DemoResult) -> Iterator[str]:
    block_sizes = (result.off.cache.block_size, result.on.server.cache.block_size)
    if len(set(block_sizes)) > 1:
        yield f"A block has {block_sizes[0]} tokens without KVPP, but {block_sizes[1]} with it."
    cases = (
        ("without KVPP", result.off.cache.num_blocks, result.expected.num_blocks_off),
        ("with KVPP", result.on.server.cache.num_blocks, result.expected.num_blocks_on),
    )
    for name, found, expected in cases:
        if abs(found - expected) > BLOCK_TOLERANCE:
            yield f"The KV cache {name} has {found} blocks, but {expected} were computed."
    if result.factor <= 1:
        yield f"KVPP holds no more tokens than without it (factor {result.factor:.2f})."
    for report in result.on.reports:
        if report.num_blocks != result.on.server.cache.num_blocks:
            yield (
                f"Rank {report.group_rank} reports {report.num_blocks} blocks, but the engine "
                f"{result.on.server.cache.num_blocks}."
            )


def _check_memory(result: DemoResult) -> Iterator[str]:
    for name, run in (("without KVPP", result.off), ("with KVPP", result.on.server)):
        for rank, num_bytes in enumerate(run.cache_bytes):
            if not 0 < num_bytes <= result.kv_cache_bytes:
                yield (
                    f"Rank {rank} {name} has allocated {num_bytes:,} bytes for its cache; {result.kv_cache_bytes:,} "
                    "were given."
                )


def _check_accuracy(result: DemoResult) -> Iterator[str]:
    cases = (
        ("without KVPP", result.off.answers),
        ("with KVPP", result.on.server.answers),
        ("with the transfers mended", result.on.mended_answers),
    )
    for name, answers in cases:
        if result.accuracy(answers) < MIN_ACCURACY:
            yield f"{_describe_share(result, answers)} answers {name} are right, fewer than {MIN_ACCURACY:.0%}."


def _check_equal_answers(result: DemoResult) -> Iterator[str]:
    if differing := count_differing(result.on.server.answers, result.off.answers):
        yield f"{differing} of {len(result.questions)} answers differ with and without KVPP."
    difference = find_largest_logprob_difference(result.on.server.answers, result.off.answers)
    # Not `>`: a NaN has to count as off.
    if not difference <= LOGPROB_TOLERANCE:
        yield (
            f"Log probabilities differ by up to {difference:.2g} with and without KVPP; up to {LOGPROB_TOLERANCE:g} is "
            "allowed."
        )


def _check_control(result: DemoResult) -> Iterator[str]:
    broken, working = result.on.broken_answers, result.on.server.answers
    if result.accuracy(broken) > MAX_BROKEN_SHARE * result.accuracy(working):
        yield (
            f"With the transfers broken on purpose {_describe_share(result, broken)} answers are right: the answers do "
            "not show whether the cache was moved."
        )
    if result.on.broken_bytes:
        yield f"With the transfers broken on purpose {result.on.broken_bytes:,} bytes were moved all the same."


def _check_transfers(result: DemoResult) -> Iterator[str]:
    reports = result.on.reports
    if len(reports) != result.tp_size:
        yield f"{len(reports)} ranks have sent a report, but there are {result.tp_size}."
    for report in reports:
        yield from _check_report(report)
    if len({(report.steps, report.transfers, report.transferred_bytes, report.exchanges) for report in reports}) > 1:
        yield "The ranks do not count the same steps, transfers and bytes."


def _check_report(report: RankReport) -> Iterator[str]:
    rank = f"Rank {report.group_rank}"
    moving_steps = report.steps_with_transfers + report.steps_at_owner
    if moving_steps > 0 and report.moved_bytes == 0:
        yield f"{rank} has moved nothing in {moving_steps} steps."
    if report.transfers != report.steps_with_transfers * report.num_layers:
        yield (
            f"{rank} counts {report.transfers} transfers in {report.steps_with_transfers} steps of "
            f"{report.num_layers} layers."
        )
    if report.exchanges != report.steps_at_owner * report.num_layers:
        yield (
            f"{rank} counts {report.exchanges} exchanges in {report.steps_at_owner} steps of {report.num_layers} "
            "layers."
        )
    if moving_steps + report.steps_in_place < report.steps_with_history:
        yield f"{rank} has seen steps with history in which nothing travelled, nor was anything read in place."
    if report.steps_without_history <= 0:
        yield f"{rank} has seen no step without history, so it is not shown that such a step moves nothing."


def _describe_share(result: DemoResult, answers: Sequence[Answer]) -> str:
    return f"{result.count_right(answers)} of {len(result.questions)}"
