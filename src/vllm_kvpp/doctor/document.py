"""The diagnosis in plain values, for `--json`."""

from dataclasses import asdict
from typing import Any

from vllm_kvpp import __version__
from vllm_kvpp.doctor.diagnosis import Diagnosis
from vllm_kvpp.doctor.verdicts import describe_title, describe_verdict


def make_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Write the diagnosis in plain values; `command` is null if none was given."""
    return {
        "version": __version__,
        "is_fine": diagnosis.is_fine,
        "installation": {**asdict(diagnosis.installation), "vllm_versions": dict(diagnosis.installation.vllm_versions)},
        "checks": [asdict(check) for check in diagnosis.checks],
        "command": _describe_command(diagnosis),
    }


def _describe_command(diagnosis: Diagnosis) -> dict[str, Any] | None:
    if not diagnosis.has_command:
        return None
    return {
        "title": describe_title(diagnosis),
        "explanations": list(describe_verdict(diagnosis)),
        "verdict": diagnosis.verdict.model_dump(mode="json") if diagnosis.verdict is not None else None,
    }
