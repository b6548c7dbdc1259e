"""The process that imports vLLM and is asked; nothing that it prints reaches our outputs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from vllm_kvpp.vllm_seam.findings import Findings, ServeCommand

INSPECTION = "vllm_kvpp.vllm_seam.inspection"


def ask_vllm(command: ServeCommand | None, environment: Mapping[str, str], *, timeout_seconds: float) -> Findings:
    """Ask the installed vLLM; a process that ends without an answer, or not in time, is an answer with an `error`."""
    with tempfile.TemporaryDirectory(prefix="vllm-kvpp-", ignore_cleanup_errors=True) as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        question = command.model_dump_json() if command is not None else ""
        # -P: a folder named vllm in the working directory is not what a server imports.
        argv = [sys.executable, "-P", "-m", INSPECTION, str(answer)]
        try:
            ended = _run(argv, environment, question, log, timeout_seconds)
        except subprocess.TimeoutExpired:
            return Findings(error=f"no answer within {timeout_seconds:g} s; raise --timeout{_quote_last_line(log)}")
        try:
            return Findings.model_validate_json(answer.read_bytes())
        except (OSError, ValidationError):
            return Findings(error=f"the process that imports it ended with code {ended}{_quote_last_line(log)}")


def _run(argv: list[str], environment: Mapping[str, str], question: str, log: Path, timeout_seconds: float) -> int:
    with log.open("wb") as output:
        return subprocess.run(
            argv,
            env={**os.environ, **environment},
            # Not as an argument, which every user of the machine could read.
            input=question.encode(),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_seconds,
            check=False,
        ).returncode


def _quote_last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" (its last line: {last[:300]})" if last else ""
