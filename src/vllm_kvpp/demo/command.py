"""`vllm-kvpp demo` from its options to its exit code: what goes to stdout, what to stderr, and which files stay."""

import json
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from vllm_kvpp.demo.app import Demo, DemoOptions
from vllm_kvpp.demo.checks import find_problems
from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.interrupts import Interrupted, Interrupts
from vllm_kvpp.demo.progress import ProgressReporter
from vllm_kvpp.demo.report import make_document, make_report
from vllm_kvpp.demo.results import DemoResult

AS_CLAIMED, NOT_AS_CLAIMED, CANNOT_RUN = 0, 1, 2


def run_command(options: DemoOptions, *, as_json: bool, log_dir: Path | None) -> int:
    """Run the demo, print its result to stdout and everything else to stderr, and return the exit code.

    0: everything is as claimed. 1: some claim does not hold. 2: the demo could not run. 130: Ctrl-C. Logs are removed
    after a 0, unless the user chose their folder.
    """
    stderr = Console(stderr=True)
    try:
        with Interrupts() as interrupts:
            demo = Demo(options, progress=ProgressReporter(stderr), interrupts=interrupts)
            return _run_with_logs(demo, as_json=as_json, log_dir=log_dir, stderr=stderr)
    except Interrupted as interrupted:
        _print_plain(stderr, f"Stopped by {interrupted}; the servers have been ended.")
        return interrupted.exit_code
    except DemoError as error:
        return _give_up(str(error), as_json=as_json, stderr=stderr)


def _run_with_logs(demo: Demo, *, as_json: bool, log_dir: Path | None, stderr: Console) -> int:
    logs = _make_log_dir(log_dir)
    exit_code: int | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="vllm-kvpp-", ignore_cleanup_errors=True) as scratch_dir:
            result = demo.run(log_dir=logs, scratch_dir=Path(scratch_dir))
        exit_code = _print_result(result, as_json=as_json)
        return exit_code
    finally:
        if exit_code == AS_CLAIMED and log_dir is None:
            shutil.rmtree(logs, ignore_errors=True)
        else:
            _print_plain(stderr, f"The servers' logs are in {logs}.")


def _print_result(result: DemoResult, *, as_json: bool) -> int:
    problems = find_problems(result)
    if as_json:
        print(json.dumps(make_document(result, problems), indent=2))
    else:
        Console().print(make_report(result, problems))
    return NOT_AS_CLAIMED if problems else AS_CLAIMED


def _give_up(message: str, *, as_json: bool, stderr: Console) -> int:
    if as_json:
        print(json.dumps({"is_as_claimed": False, "error": message}, indent=2))
    stderr.print("The demo cannot go on.", style="bold red")
    _print_plain(stderr, message)
    return CANNOT_RUN


def _make_log_dir(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="vllm-kvpp-demo-"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--log-dir {wanted} cannot be used ({error.strerror}).") from error
    return wanted.absolute()


def _print_plain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
