"""Each way of being off is reported, alone, and nothing else is."""

from dataclasses import replace

import pytest

from vllm_kvpp.demo.capacity import ExpectedCapacity
from vllm_kvpp.demo.checks import count_differing, find_largest_logprob_difference, find_problems
from vllm_kvpp.demo.client import CacheSize
from vllm_kvpp.demo.questions import NUM_WORDS


def change_on(result, **changes):
    return replace(result, on=replace(result.on, **changes))


def change_on_server(result, **changes):
    return change_on(result, server=replace(result.on.server, **changes))


def change_off(result, **changes):
    return replace(result, off=replace(result.off, **changes))


def change_reports(result, **changes):
    return change_on(result, reports=tuple(replace(report, **changes) for report in result.on.reports))


def spoil(answers, **changes):
    return (replace(answers[0], **changes), *answers[1:])


def test_where_decode_reads_in_place_nothing_has_to_move(result):
    nothing = dict.fromkeys(
        ("steps_with_transfers", "transfers", "transferred_bytes", "steps_at_owner", "exchanges", "exchanged_bytes"), 0
    )
    assert find_problems(change_reports(result, **nothing, steps_in_place=11)) == ()


def test_a_result_as_claimed_has_no_problems(result):
    assert find_problems(result) == ()


def test_one_block_more_or_less_than_computed_is_not_a_problem(result):
    expected = ExpectedCapacity(num_blocks_off=911, num_blocks_on=1209, formula_factor=8 / 6)
    assert find_problems(replace(result, expected=expected)) == ()


CASES = {
    "blocks off": (
        lambda r: change_off(r, cache=CacheSize(912, 16)),
        "The KV cache without KVPP has 912 blocks, but 910 were computed.",
    ),
    "blocks on": (
        lambda r: replace(r, expected=replace(r.expected, num_blocks_on=1212)),
        "The KV cache with KVPP has 1210 blocks, but 1212 were computed.",
    ),
    "block size": (
        lambda r: change_off(r, cache=CacheSize(910, 8)),
        "A block has 8 tokens without KVPP, but 16 with it.",
    ),
    "no gain": (
        lambda r: replace(
            change_off(r, cache=CacheSize(1210, 16)), expected=ExpectedCapacity(1210, 1210, formula_factor=1.0)
        ),
        "no more tokens than without it (factor 1.00)",
    ),
    "too much memory on": (
        lambda r: change_on_server(r, cache_bytes=(1000, 1025)),
        "Rank 1 with KVPP has allocated 1,025 bytes",
    ),
    "no memory off": (
        lambda r: change_off(r, cache_bytes=(0, 1000)),
        "Rank 0 without KVPP has allocated 0 bytes",
    ),
    "other words": (
        lambda r: change_on_server(r, answers=spoil(r.on.server.answers, text="oslo")),
        "1 of 4 answers differ with and without KVPP.",
    ),
    "other tokens": (
        lambda r: change_on_server(r, answers=spoil(r.on.server.answers, token_ids=(1,) * NUM_WORDS)),
        "1 of 4 answers differ with and without KVPP.",
    ),
    "other logprobs": (
        lambda r: change_on_server(r, answers=spoil(r.on.server.answers, logprobs=(-0.26,) * NUM_WORDS)),
        "Log probabilities differ by up to 0.01",
    ),
    "logprobs that are no numbers": (
        lambda r: change_on_server(r, answers=spoil(r.on.server.answers, logprobs=(float("nan"),) * NUM_WORDS)),
        "Log probabilities differ by up to nan",
    ),
    "wrong when mended": (
        lambda r: change_on(r, mended_answers=r.on.broken_answers),
        "0 of 4 answers with the transfers mended are right, fewer than 95%.",
    ),
    "right when broken": (
        lambda r: change_on(r, broken_answers=(*r.on.server.answers[:3], r.on.broken_answers[3])),
        "With the transfers broken on purpose 3 of 4 answers are right",
    ),
    "moved when broken": (
        lambda r: change_on(r, broken_bytes=1),
        "With the transfers broken on purpose 1 bytes were moved all the same.",
    ),
    "nothing moved": (
        lambda r: change_reports(r, transferred_bytes=0, exchanged_bytes=0),
        "Rank 0 has moved nothing in 11 steps.",
    ),
    "transfers missing": (
        lambda r: change_reports(r, transfers=31),
        "Rank 1 counts 31 transfers in 4 steps of 8 layers.",
    ),
    "exchanges missing": (
        lambda r: change_reports(r, exchanges=55),
        "Rank 1 counts 55 exchanges in 7 steps of 8 layers.",
    ),
    "steps in which nothing travelled": (
        lambda r: change_reports(r, steps_at_owner=5, exchanges=40),
        "Rank 0 has seen steps with history in which nothing travelled, nor was anything read in place.",
    ),
    "every step with history": (
        lambda r: change_reports(r, steps=11),
        "Rank 0 has seen no step without history",
    ),
    "a rank missing": (
        lambda r: change_on(r, reports=r.on.reports[:1]),
        "1 ranks have sent a report, but there are 2.",
    ),
    "ranks that differ": (
        lambda r: change_on(r, reports=(r.on.reports[0], replace(r.on.reports[1], transferred_bytes=5))),
        "The ranks do not count the same",
    ),
    "rank and engine differ": (
        lambda r: change_on(r, reports=(r.on.reports[0], replace(r.on.reports[1], num_blocks=1211))),
        "Rank 1 reports 1211 blocks, but the engine 1210.",
    ),
}


@pytest.mark.parametrize(("change", "expected"), CASES.values(), ids=CASES)
def test_a_claim_that_does_not_hold_is_named(result, change, expected):
    problems = find_problems(change(result))
    assert any(expected in problem for problem in problems), problems


def test_wrong_answers_are_named_with_and_without_kvpp(result):
    wrong = spoil(result.off.answers, text="oslo")
    problems = find_problems(change_off(change_on_server(result, answers=wrong), answers=wrong))
    assert [problem.split(" are ")[0] for problem in problems] == [
        "3 of 4 answers without KVPP",
        "3 of 4 answers with KVPP",
    ]


def test_differing_answers_are_counted_once(result):
    answers = result.off.answers
    assert count_differing(spoil(answers, text="x", token_ids=(1,)), answers) == 1


def test_the_largest_logprob_difference_is_taken_over_all_tokens(result):
    answers = result.off.answers
    last = replace(answers[-1], logprobs=(*answers[-1].logprobs[:-1], -0.75))
    assert find_largest_logprob_difference((*answers[:-1], last), answers) == pytest.approx(0.5)
