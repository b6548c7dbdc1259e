"""The result for people, as a table and a sentence, and for programs, as one JSON document."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_kvpp import __version__
from vllm_kvpp.demo.checks import count_differing, find_largest_logprob_difference
from vllm_kvpp.demo.client import Answer
from vllm_kvpp.demo.questions import NUM_WORDS, is_right
from vllm_kvpp.demo.results import DemoResult, ServerRun

NOTHING = "–"
EXAMPLE_WORDS = 6


def make_report(result: DemoResult, problems: Sequence[str]) -> Group:
    """Put together what is printed: the table, one question as an example, and the verdict."""
    return Group(make_table(result), Text(), *_make_example(result), Text(), make_verdict(result, problems))


def make_table(result: DemoResult) -> Table:
    """Lay out the numbers of the three runs side by side."""
    table = Table(title=f"The same model, questions and memory on {result.tp_size} ranks", title_style="bold")
    table.add_column("", overflow="fold")
    for name in ("KVPP off", "KVPP on", "on, transfers\nbroken on purpose"):
        table.add_column(name, justify="right")
    for row in (*_list_cache_rows(result), None, *_list_answer_rows(result), None, *_list_run_rows(result)):
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    return table


def _list_cache_rows(result: DemoResult) -> tuple[tuple[str, ...], ...]:
    off, on, expected = result.off, result.on.server, result.expected
    return (
        ("KV cache memory per rank", _mib(max(off.cache_bytes)), _mib(max(on.cache_bytes)), NOTHING),
        ("KV cache tokens that fit", f"{off.cache.num_tokens:,}", f"{on.cache.num_tokens:,}", NOTHING),
        (
            "  computed beforehand",
            f"{expected.num_blocks_off * off.cache.block_size:,}",
            f"{expected.num_blocks_on * on.cache.block_size:,}",
            NOTHING,
        ),
        ("  times as many", "1", f"{result.factor:.3f}", NOTHING),
        ("  by the formula L/(⌈L/N⌉+2)", "1", f"{expected.formula_factor:.3f}", NOTHING),
    )


def _list_answer_rows(result: DemoResult) -> tuple[tuple[str, ...], ...]:
    off, on, broken = result.off.answers, result.on.server.answers, result.on.broken_answers
    total = len(result.questions)
    return (
        ("right answers", *(f"{result.count_right(answers)} of {total}" for answers in (off, on, broken))),
        (
            "same text and tokens as off",
            NOTHING,
            *(f"{total - count_differing(answers, off)} of {total}" for answers in (on, broken)),
        ),
        (
            "largest logprob difference",
            *(NOTHING, f"{find_largest_logprob_difference(on, off):.1g}", NOTHING),
        ),
    )


def _list_run_rows(result: DemoResult) -> tuple[tuple[str, ...], ...]:
    off, on, report = result.off, result.on.server, result.on.reports[0]
    return (
        ("bytes moved, on rank 0", NOTHING, f"{report.moved_bytes:,}", f"{result.on.broken_bytes:,}"),
        ("  history, in layer transfers", NOTHING, f"{report.transferred_bytes:,}", NOTHING),
        ("  queries to owners, outputs", NOTHING, f"{report.exchanged_bytes:,}", NOTHING),
        ("steps with history", NOTHING, f"{report.steps_with_history:,}", NOTHING),
        ("  of which decode in place", NOTHING, f"{report.steps_in_place:,}", NOTHING),
        ("  of which decode at the owner", NOTHING, f"{report.steps_at_owner:,}", NOTHING),
        ("steps without, nothing moved", NOTHING, f"{report.steps_without_history:,}", NOTHING),
        ("seconds to start", f"{off.start_seconds:.0f}", f"{on.start_seconds:.0f}", NOTHING),
        ("seconds to answer", f"{off.answer_seconds:.1f}", f"{on.answer_seconds:.1f}", NOTHING),
    )


def _make_example(result: DemoResult) -> tuple[Text, ...]:
    """Show the beginnings of all answers to the first question."""
    question = result.questions[0]
    lines = (
        ("One prompt", f"… {' '.join(question.prompt.split()[-EXAMPLE_WORDS:])}"),
        ("goes on", _shorten(question.continuation(NUM_WORDS))),
        ("KVPP off", _shorten(result.off.answers[0].text)),
        ("KVPP on", _shorten(result.on.server.answers[0].text)),
        ("broken", _shorten(result.on.broken_answers[0].text)),
    )
    note = "The first word comes out of the prompt's own pass, which moves nothing; all others are read from the cache."
    return (*(Text(f"{name:>10}  {text}") for name, text in lines), Text(note, style="dim"))


def _shorten(text: str) -> str:
    return f"{' '.join(text.split()[:EXAMPLE_WORDS])} …"


def make_verdict(result: DemoResult, problems: Sequence[str]) -> Text:
    """Say in one sentence how it went; when something is off, with a line for each claim that does not hold."""
    if problems:
        return Text("\n".join(("Something is off:", *(f"  - {problem}" for problem in problems))), style="bold red")
    return Text(
        f"In the same memory KVPP keeps {result.factor:.2f} times as many tokens, as computed, and gives the same "
        "answers; without its transfers they are wrong.",
        style="bold green",
    )


def make_document(result: DemoResult, problems: Sequence[str]) -> dict[str, Any]:
    """Write the result in plain values for `--json`."""
    on, off = result.on, result.off
    return {
        "version": __version__,
        "is_as_claimed": not problems,
        "problems": list(problems),
        "tensor_parallel_size": result.tp_size,
        "kv_cache_bytes_given": result.kv_cache_bytes,
        "factor": result.factor,
        "factor_expected": result.expected_factor,
        "factor_by_formula": result.expected.formula_factor,
        "off": _describe_run(result, off, result.expected.num_blocks_off),
        "on": {
            **_describe_run(result, on.server, result.expected.num_blocks_on),
            "reports": [asdict(report) for report in on.reports],
        },
        "broken": {"num_right": result.count_right(on.broken_answers), "transferred_bytes": on.broken_bytes},
        "mended": {"num_right": result.count_right(on.mended_answers)},
        "num_differing": count_differing(on.server.answers, off.answers),
        "largest_logprob_difference": find_largest_logprob_difference(on.server.answers, off.answers),
        "questions": [_describe_question(result, index) for index in range(len(result.questions))],
    }


def _describe_run(result: DemoResult, run: ServerRun, num_blocks_expected: int) -> dict[str, Any]:
    return {
        "num_tokens": run.cache.num_tokens,
        "num_blocks": run.cache.num_blocks,
        "num_blocks_expected": num_blocks_expected,
        "block_size": run.cache.block_size,
        "kv_cache_bytes": list(run.cache_bytes),
        "num_right": result.count_right(run.answers),
        "start_seconds": round(run.start_seconds, 3),
        "answer_seconds": round(run.answer_seconds, 3),
    }


def _describe_question(result: DemoResult, index: int) -> dict[str, Any]:
    question = result.questions[index]
    answers: dict[str, Answer] = {
        "off": result.off.answers[index],
        "on": result.on.server.answers[index],
        "broken": result.on.broken_answers[index],
    }
    return {
        "prompt": question.prompt,
        "right": question.continuation(NUM_WORDS),
        **{name: {"text": answer.text, "is_right": is_right(question, answer)} for name, answer in answers.items()},
    }


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**2:,.1f} MiB"
