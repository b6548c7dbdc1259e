"""`vllm-kvpp doctor` from its words to its exit code: the diagnosis on stdout, errors in one line on stderr."""

import json
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console

from vllm_kvpp.doctor.diagnosis import AskVLLM, Diagnosis, diagnose
from vllm_kvpp.doctor.document import make_document
from vllm_kvpp.doctor.errors import DoctorError
from vllm_kvpp.doctor.report import make_report
from vllm_kvpp.doctor.serve_command import read_words
from vllm_kvpp.doctor.vllm_process import ask_vllm
from vllm_kvpp.vllm_seam.findings import Findings, ServeCommand

FINE, NOT_FINE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
# What the tables need where the output is no terminal.
WIDTH_OF_FILES = 100


def run_command(words: Sequence[str], *, timeout_seconds: float, as_json: bool) -> int:
    """Diagnose, print, and return the exit code.

    0: nothing stands in KVPP's way. 1: something would stop it, or the command line is refused. 2: the command line
    cannot be read, with one line that says what would do.
    """
    try:
        typed = read_words(words)
        diagnosis = diagnose(typed, _with_progress(timeout_seconds))
    except DoctorError as error:
        print(f"vllm-kvpp doctor: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    _print(diagnosis, as_json=as_json)
    return FINE if diagnosis.is_fine else NOT_FINE


def _with_progress(timeout_seconds: float) -> AskVLLM:
    def ask(command: ServeCommand | None, environment: Mapping[str, str]) -> Findings:
        what = "look at it" if command is None else "build the configuration of this command line"
        # Shown on a terminal only, and wiped at the end.
        with Console(stderr=True).status(f"Importing vLLM to {what}, about 10 to 30 s …"):
            return ask_vllm(command, environment, timeout_seconds=timeout_seconds)

    return ask


def _print(diagnosis: Diagnosis, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(make_document(diagnosis), indent=2))
    else:
        width = None if sys.stdout.isatty() else WIDTH_OF_FILES
        Console(width=width, highlight=False).print(make_report(diagnosis))
