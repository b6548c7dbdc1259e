"""What a server's log says: the phase of its start, and what went wrong."""

import re
from pathlib import Path

# In the order in which vLLM writes them; the last one found is where the start is.
PHASES: tuple[tuple[str, str], ...] = (
    ("non-default args", "reading the configuration"),
    ("Initializing a V1 LLM engine", "starting one process for each rank"),
    ("distributed_init_method", "connecting the ranks"),
    ("Starting to load model", "loading the model"),
    ("KV cache size", "making the KV cache"),
    ("Starting vLLM server", "opening the HTTP port"),
)
FIRST_PHASE = "importing vLLM"
_ERROR = re.compile(r"\b\w*(?:Error|Exception): \S.*")
_NO_ERROR = re.compile(r"\b(?:DEBUG|INFO|WARNING) ")
_SHARED_MEMORY = re.compile(r"distributed_init_method=file://\S*/(vllm_dist_\w+)")


def find_phase(log: str) -> str:
    """Name the phase of the start that `log` has reached."""
    reached = [phase for mark, phase in PHASES if mark in log]
    return reached[-1] if reached else FIRST_PHASE


def find_first_error(log: str) -> str | None:
    """The first line that names an error: later ones tend to be its consequences in other processes."""
    lines = (line for line in log.splitlines() if not _NO_ERROR.search(line))
    found = next(filter(None, map(_ERROR.search, lines)), None)
    return found.group().strip() if found else None


def take_last_lines(log: str, num_lines: int) -> str:
    """The last lines that are not empty."""
    lines = [line for line in log.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])


def find_shared_memory(log: str) -> frozenset[str]:
    """Prefixes of the names in /dev/shm that the server's ranks made, and leave behind when they end."""
    return frozenset(_SHARED_MEMORY.findall(log))


def read_log(path: Path) -> str:
    """Read a log that is still being written; whatever is not UTF-8 in it is replaced."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
