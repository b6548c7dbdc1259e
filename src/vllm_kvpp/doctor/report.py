"""The diagnosis for people, as tables and sentences."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_kvpp.doctor.checks import Level
from vllm_kvpp.doctor.diagnosis import BAD_OUTCOMES, Diagnosis
from vllm_kvpp.doctor.verdicts import describe_title, describe_verdict, list_facts

MARKS: dict[Level, Text] = {
    "ok": Text("ok", style="green"),
    "warning": Text("warning", style="yellow"),
    "problem": Text("problem", style="bold red"),
}


def make_report(diagnosis: Diagnosis) -> Group:
    """Put together what is printed."""
    parts: list[RenderableType] = [_make_check_table(diagnosis), Text()]
    if diagnosis.has_command:
        parts += [*_list_verdict(diagnosis), Text()]
    return Group(*parts, _make_last_line(diagnosis))


def _make_check_table(diagnosis: Diagnosis) -> Table:
    table = Table(title="What is installed", title_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found")
    for check in diagnosis.checks:
        table.add_row(check.name, MARKS[check.level], Text(check.text))
    return table


def _list_verdict(diagnosis: Diagnosis) -> tuple[RenderableType, ...]:
    verdict = diagnosis.verdict
    is_bad = verdict is None or verdict.outcome in BAD_OUTCOMES
    title = Text(f"With this command line: {describe_title(diagnosis)}", style="bold red" if is_bad else "bold")
    rows = [("•", sentence) for sentence in describe_verdict(diagnosis)]
    return (title, *_make_grid(rows), *_make_grid([(f"  {name}", value) for name, value in list_facts(diagnosis)]))


def _make_grid(rows: Sequence[tuple[str, str]]) -> tuple[Table, ...]:
    # An empty grid would print an empty line.
    if not rows:
        return ()
    grid = Table.grid(padding=(0, 1))
    for row in rows:
        grid.add_row(*map(Text, row))
    return (grid,)


def _make_last_line(diagnosis: Diagnosis) -> Text:
    if diagnosis.is_fine:
        return Text("Nothing stands in KVPP's way.", style="bold green")
    return Text("KVPP would not run as asked; see what is red above.", style="bold red")
