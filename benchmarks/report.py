"""The result of a benchmark: a table for people, in the terminal or as Markdown, and one JSON document for programs."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import describe_machine
from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class ReportTable:
    """Rows of text under named columns; the first `num_label_columns` are labels, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    num_label_columns: int = 1


@dataclass(frozen=True)
class BenchmarkReport:
    """What a benchmark found.

    `settings` is what it was told to do, `samples` every single measurement with its unit in the key, `ratios` the
    paired ratios (`Ratio` or nested mappings of them). All three hold plain values or dataclasses of them. `date` is
    when the report was made, behind the last measurement.
    """

    name: str
    tables: tuple[ReportTable, ...]
    settings: Mapping[str, Any]
    samples: Any
    ratios: Mapping[str, Any]
    date: datetime = field(default_factory=lambda: datetime.now(UTC))


def publish(report: BenchmarkReport, *, json_path: Path | None = None, markdown_path: Path | None = None) -> None:
    """Print the tables to stdout, and write the files that were asked for."""
    console = Console()
    if not console.is_terminal:
        # A table in a file or a pipe is as wide as it has to be.
        console = Console(width=200)
    for table in report.tables:
        console.print(make_rich_table(table))
        for note in table.notes:
            console.print(note, markup=False, highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps(make_document(report), indent=2) + "\n")
    if markdown_path is not None:
        markdown_path.write_text("\n\n".join(make_markdown(table) for table in report.tables) + "\n")


def make_rich_table(table: ReportTable) -> Table:
    """Lay the table out for a terminal."""
    laid_out = Table(title=table.title, title_style="bold", box=box.SIMPLE_HEAD)
    for index, name in enumerate(table.columns):
        laid_out.add_column(name, justify="left" if index < table.num_label_columns else "right", overflow="fold")
    for row in table.rows:
        laid_out.add_row(*row)
    return laid_out


def make_markdown(table: ReportTable) -> str:
    """Write the table as Markdown: its title in bold, the rows, the notes below."""
    rules = ["---" if index < table.num_label_columns else "---:" for index in range(len(table.columns))]
    lines = [_markdown_row(row) for row in (table.columns, rules, *table.rows)]
    return "\n\n".join((f"**{table.title}**", "\n".join(lines), *table.notes))


def make_document(report: BenchmarkReport) -> dict[str, Any]:
    """Put everything into plain values, with the machine, the date and the command line."""
    return {
        "benchmark": report.name,
        "command": describe_command(),
        "date": report.date.isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "settings": _to_plain(report.settings),
        "ratios": _to_plain(report.ratios),
        "samples": _to_plain(report.samples),
        "tables": [asdict(table) for table in report.tables],
    }


def describe_command() -> str:
    """The command line as typed, with the script's name in place of its path and without the files it wrote to."""
    arguments: list[str] = []
    rest = iter(sys.argv[1:])
    for argument in rest:
        if argument in ("--json", "--markdown"):
            next(rest, None)
        elif not argument.startswith(("--json=", "--markdown=")):
            arguments.append(argument)
    return shlex.join((f"benchmarks/{Path(sys.argv[0]).name}", *arguments))


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _to_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return value
