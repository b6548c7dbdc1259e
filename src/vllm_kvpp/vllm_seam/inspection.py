"""Ask the installed vLLM what it is, and what it would do with a command line. Runs in a process of its own.

    python -m vllm_kvpp.vllm_seam.inspection ANSWER

The standard input is a `ServeCommand` in JSON, or empty; the file ANSWER takes the `Findings`. vLLM writes to both
outputs, starts threads and changes the environment, so nothing of it belongs into the process that prints a report.
"""

import sys
from pathlib import Path
from typing import Any

from vllm_kvpp.vllm_seam.doctor_symbols import DOCTOR_SYMBOLS
from vllm_kvpp.vllm_seam.findings import Findings, ServeCommand, describe_error
from vllm_kvpp.vllm_seam.symbols import SEAM, find_faults

# The latent and the rotary part of DeepSeek's and Kimi's models.
MLA_HEAD_SIZE = 576


def inspect_vllm(command: ServeCommand | None) -> Findings:
    """Ask everything that can be asked; what fails is part of the answer."""
    try:
        from vllm.platforms import current_platform

        platform, device = type(current_platform).__name__, str(current_platform.device_type)
    except Exception as error:
        return Findings(error=describe_error(error))
    attach_error = _load_plugins()
    doctor_faults = find_faults(DOCTOR_SYMBOLS)
    findings = Findings(
        platform=platform,
        device=device,
        attention_backend=None if doctor_faults else _name_usual_backend(),
        is_attached=_is_attached(current_platform),
        attach_error=attach_error,
        num_symbols=len(SEAM),
        faults=find_faults(),
        doctor_faults=doctor_faults,
    )
    if command is None or doctor_faults:
        return findings
    from vllm_kvpp.vllm_seam.command_line import judge_command

    return findings.model_copy(update={"verdict": judge_command(command, is_attached=findings.is_attached)})


def _load_plugins() -> str | None:
    try:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
    except Exception as error:
        return describe_error(error)
    return None


def _is_attached(platform: Any) -> bool:
    try:
        from vllm_kvpp.vllm_seam.platform_hook import is_wrapped

        return is_wrapped(type(platform))
    except Exception:
        # The faults name the symbol that is missing.
        return False


def _name_usual_backend() -> str | None:
    """The attention backend for an MLA model in bfloat16 with default settings; None if vLLM has none here."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config

        from vllm_kvpp.vllm_seam.command_line import choose_backend

        config = VllmConfig()
        with set_current_vllm_config(config):
            return str(choose_backend(MLA_HEAD_SIZE, "bfloat16", "auto").get_name())
    except Exception:
        return None


def main() -> None:
    """Answer the question on the standard input."""
    question = sys.stdin.read()
    command = ServeCommand.model_validate_json(question) if question else None
    Path(sys.argv[1]).write_text(inspect_vllm(command).model_dump_json())


if __name__ == "__main__":
    main()
