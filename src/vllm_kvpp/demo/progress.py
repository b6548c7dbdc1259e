"""What is going on, on stderr: a spinner with a clock in a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ProgressReporter:
    """Names the stage that runs and its phases."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[str], None]]:
        """Enclose one stage; the value that is yielded is called with the phase inside it, as often as one likes."""
        started = time.monotonic()
        show = self._show_live if self._console.is_terminal else self._show_lines
        with show(title) as on_phase:
            yield on_phase
        self._console.print(f"[green]✓[/green] {escape(title)} ({time.monotonic() - started:.0f} s)", highlight=False)

    @contextmanager
    def _show_live(self, title: str) -> Iterator[Callable[[str], None]]:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(escape(title))
            yield lambda phase: progress.update(task, description=escape(f"{title}: {phase}"))

    @contextmanager
    def _show_lines(self, title: str) -> Iterator[Callable[[str], None]]:
        started = time.monotonic()
        last = ""

        def on_phase(phase: str) -> None:
            nonlocal last
            if phase != last:
                last = phase
                self._print_line(f"{title}: {phase} ({time.monotonic() - started:.0f} s)")

        self._print_line(f"{title} …")
        yield on_phase

    def _print_line(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
