"""A process that imports one vLLM release, installed or as source only, and answers questions about it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import vllm_next

_QUESTIONS = Path(__file__).with_name("vllm_questions.py")


class VllmProcess:
    """Answers the functions of `vllm_questions.py` with the vLLM that stands first on its path."""

    def __init__(self, name: str, source: Path | None) -> None:
        self.name = name
        # Model runner V1, which KVPP supports, whatever a release chooses by itself.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_PLUGINS": ""}
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        self._process = subprocess.Popen(
            [sys.executable, str(_QUESTIONS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, question: str, **arguments: Any) -> Any:
        """Call a function of `vllm_questions.py` there; its error is raised here."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([question, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the process with vLLM {self.name} ended (exit code {self._process.wait()}); its output says why"
        answer, error = json.loads(line)
        assert error is None, f"vLLM {self.name} could not answer {question}:\n{error}"
        return answer

    def find_fault(self, path: str, **checks: Any) -> str | None:
        """What `SeamSymbol.find_fault` says about a symbol there: its parameters, fields or order in the source."""
        fault: str | None = self.ask("find_fault", path=path, checks=checks)
        return fault

    def close(self) -> None:
        """End the process."""
        # It holds nothing: an orderly end would only unload torch.
        self._process.kill()
        self._process.wait()


def start_installed() -> VllmProcess:
    """The release that is installed, with its compiled parts."""
    return VllmProcess("installed", None)


def start_next() -> VllmProcess:
    """The release that `make vllm-next` fetched, without compiled parts."""
    assert (vllm_next.FOLDER / "vllm").is_dir(), f"{vllm_next.FOLDER} is not there; run `make vllm-next` once"
    return VllmProcess(vllm_next.VERSION, vllm_next.FOLDER)
