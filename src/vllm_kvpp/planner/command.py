"""`vllm-kvpp plan` from its options to its exit code: the plan on stdout, one line on stderr if there is none."""

import json
import sys
from pathlib import Path

from rich.console import Console

from vllm_kvpp.planner.document import make_document
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.planning import PlanOptions, make_plan
from vllm_kvpp.planner.plot_file import check_plot, write_plot
from vllm_kvpp.planner.report import make_report

PLANNED, CANNOT_PLAN = 0, 2
# What the tables need where the output is no terminal.
WIDTH_OF_FILES = 100


def run_command(options: PlanOptions, *, as_json: bool, plot: Path | None = None) -> int:
    """Plan, draw, print, and return the exit code: 0, or 2 with one line that says what is wrong and what would do."""
    try:
        if plot is not None:
            check_plot(plot)
        plan = make_plan(options)
        if plot is not None:
            write_plot(plan, plot)
    except PlannerError as error:
        print(f"vllm-kvpp plan: {' '.join(str(error).split())}", file=sys.stderr)
        return CANNOT_PLAN
    if as_json:
        print(json.dumps(make_document(plan), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES, highlight=False).print(make_report(plan))
    return PLANNED
