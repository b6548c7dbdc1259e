"""The command line that the sweeps share: options, messages and exit codes."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from decode_engine import EngineError
from report import BenchmarkReport, publish
from rich.console import Console
from step_report import make_report
from step_sweep import ACTIVE, AUTO, FULL, Cell, SweepResult, SweepSettings, run_sweep

QUICK_REPETITIONS = 2
# Together fewer than a block has tokens, so that every step of a stretch has the same blocks.
NUM_WARM_UP_STEPS, NUM_STEPS = 2, 12
CANNOT_RUN = 2

Repetitions = Annotated[int, typer.Option(min=1, help="How often each cell is measured in each mode.")]
Quick = Annotated[bool, typer.Option("--quick", help="Only the smallest and the largest cell, two repetitions.")]
WithActive = Annotated[
    bool, typer.Option("--with-active", help="Measure the transfer mode that always sends active blocks, too.")
]
Scattered = Annotated[
    bool, typer.Option("--scattered", help="Hand out blocks in a random order, as after hours of serving.")
]
KvppOptions = Annotated[
    str, typer.Option("--kvpp", metavar="JSON", help='More options of KVPP, such as \'{"transport": "broadcast"}\'.')
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write everything that was measured to this file.")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="Write the table as Markdown to this file.")]


def choose_settings(
    cells: tuple[Cell, ...], *, repetitions: int, quick: bool, with_active: bool, scattered: bool, kvpp: str
) -> SweepSettings:
    """Turn the options into settings.

    Raises:
        typer.BadParameter: `kvpp` is not a JSON object.
    """
    return SweepSettings(
        cells=(cells[0], cells[-1]) if quick else cells,
        modes=(AUTO, FULL, ACTIVE) if with_active else (AUTO, FULL),
        kvpp=_read_object(kvpp),
        num_repetitions=min(repetitions, QUICK_REPETITIONS) if quick else repetitions,
        num_warm_up_steps=NUM_WARM_UP_STEPS,
        num_steps=NUM_STEPS,
        are_blocks_scattered=scattered,
    )


def run_command(
    name: str, title: str, sweep: str, settings: SweepSettings, *, json_path: Path | None, markdown_path: Path | None
) -> None:
    """Run the sweep and publish it, or say why it cannot run and exit with 2."""
    report: BenchmarkReport = make_report(name, title, sweep, settings, run_or_exit(settings))
    publish(report, json_path=json_path, markdown_path=markdown_path)


def run_or_exit(settings: SweepSettings) -> SweepResult:
    """Run the sweep, or say why it cannot run and exit with 2."""
    stderr = Console(stderr=True)
    # Without this, SIGTERM would leave the engines behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return run_sweep(settings, stderr)
    except EngineError as failure:
        stderr.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(CANNOT_RUN) from None


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--kvpp is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("--kvpp has to be a JSON object.")
    return value
