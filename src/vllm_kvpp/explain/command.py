"""`vllm-kvpp explain` from its options to its exit code: text on stdout, or one line on stderr if there is none."""

import json
import sys

from rich.console import Console

from vllm_kvpp.explain.document import make_document
from vllm_kvpp.explain.errors import ExplainError
from vllm_kvpp.explain.explanation import explain
from vllm_kvpp.explain.gain import Hints
from vllm_kvpp.explain.log_file import read_excerpt
from vllm_kvpp.explain.report import make_report

EXPLAINED, CANNOT_EXPLAIN = 0, 2
# What tables and sentences need where the output is no terminal.
WIDTH_OF_FILES = 100


def run_command(source: str, hints: Hints, *, as_json: bool) -> int:
    """Explain, print, and return the exit code: 0, or 2 with one line that says what is wrong and what would do."""
    try:
        explanation = explain(source, read_excerpt(source), hints)
    except ExplainError as error:
        print(f"vllm-kvpp explain: {' '.join(str(error).split())}", file=sys.stderr)
        return CANNOT_EXPLAIN
    if as_json:
        print(json.dumps(make_document(explanation), indent=2))
    else:
        width = None if sys.stdout.isatty() else WIDTH_OF_FILES
        Console(width=width, highlight=False).print(make_report(explanation))
    return EXPLAINED
