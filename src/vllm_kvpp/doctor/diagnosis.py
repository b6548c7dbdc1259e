"""From the question to the finished diagnosis."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_kvpp.doctor.checks import Check, check_installation
from vllm_kvpp.doctor.errors import DoctorError
from vllm_kvpp.doctor.installation import Installation, describe_installation
from vllm_kvpp.doctor.serve_command import TypedCommand
from vllm_kvpp.vllm_seam.findings import Findings, ServeCommand, Verdict

# With these a server would not run as its command line says.
BAD_OUTCOMES = ("not loaded", "refused", "refused by vLLM")
AskVLLM = Callable[[ServeCommand | None, Mapping[str, str]], Findings]


@dataclass(frozen=True)
class Diagnosis:
    """Everything that is printed; `verdict` is None without a command line, and where vLLM cannot be asked."""

    installation: Installation
    checks: tuple[Check, ...]
    verdict: Verdict | None = None
    has_command: bool = False

    @property
    def is_fine(self) -> bool:
        """Whether nothing would stop KVPP, and the server would do what its command line says."""
        return not any(check.level == "problem" for check in self.checks) and (
            self.verdict is None or self.verdict.outcome not in BAD_OUTCOMES
        )


def diagnose(typed: TypedCommand | None, ask_vllm: AskVLLM) -> Diagnosis:
    """Look at the environment, ask vLLM if it is there, and judge.

    Raises:
        DoctorError: vLLM's parser refuses the command line.
    """
    environment = typed.environment if typed is not None else {}
    installation = describe_installation({**os.environ, **environment})
    command = typed.command if typed is not None else None
    findings = ask_vllm(command, environment) if installation.has_vllm else None
    verdict = findings.verdict if findings is not None else None
    if verdict is not None and verdict.outcome == "malformed":
        raise DoctorError(f"vLLM cannot read the command line: {' '.join(verdict.reasons)}")
    return Diagnosis(
        installation=installation,
        checks=check_installation(installation, findings),
        verdict=verdict,
        has_command=typed is not None,
    )
