"""A server as a context: started, waited for, and gone at the end, whatever happens in between."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from vllm_kvpp.demo.client import ServerClient
from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.interrupts import Interrupts
from vllm_kvpp.demo.processes import ProcessTree
from vllm_kvpp.demo.startup_log import find_first_error, find_phase, find_shared_memory, read_log, take_last_lines

POLL_SECONDS = 0.5
GRACE_SECONDS = 15.0
# vLLM tends to hang when it is told to end while it starts, and there is nothing to lose then.
START_GRACE_SECONDS = 3.0
NUM_LOG_LINES = 20
SHARED_MEMORY_DIR = Path("/dev/shm")


@dataclass(frozen=True)
class ServerCommand:
    """What to run, and where it will answer and write its log."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    log_path: Path


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready; valid inside `run_server` only."""

    client: ServerClient
    start_seconds: float


@contextmanager
def run_server(
    command: ServerCommand,
    *,
    timeout_seconds: float,
    interrupts: Interrupts,
    on_phase: Callable[[str], None],
    grace_seconds: float = GRACE_SECONDS,
) -> Iterator[RunningServer]:
    """Start the server, wait until it is ready, and end every process of it on the way out.

    Raises:
        DemoError: it ends or is not ready within `timeout_seconds`, or fails while in use.
    """
    client = ServerClient(f"http://127.0.0.1:{command.port}", timeout_seconds=timeout_seconds)
    started = time.monotonic()
    tree = ProcessTree(command.argv, env=command.env, log_path=command.log_path)
    is_ready = False
    try:
        with interrupts.allowed():
            _wait_until_ready(tree, client, command.log_path, timeout_seconds, on_phase)
        is_ready = True
        yield RunningServer(client=client, start_seconds=time.monotonic() - started)
    except httpx.HTTPError as error:
        what = f"The server failed while it was in use ({type(error).__name__}: {error})."
        raise DemoError(_describe_failure(what, command.log_path)) from error
    finally:
        tree.stop(grace_seconds=grace_seconds if is_ready else min(grace_seconds, START_GRACE_SECONDS))
        remove_shared_memory(command.log_path)


def _wait_until_ready(
    tree: ProcessTree, client: ServerClient, log_path: Path, timeout_seconds: float, on_phase: Callable[[str], None]
) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not client.is_ready():
        tree.refresh()
        phase = find_phase(read_log(log_path))
        on_phase(phase)
        if tree.exit_code is not None:
            what = f"The server ended while it was {phase}, with exit code {tree.exit_code}."
            raise DemoError(_describe_failure(what, log_path))
        if time.monotonic() >= deadline:
            what = (
                f"The server was not ready within {timeout_seconds:g} s; it was {phase}. If it only needs longer, "
                "raise --timeout."
            )
            raise DemoError(_describe_failure(what, log_path))
        time.sleep(POLL_SECONDS)
    tree.refresh()


def _describe_failure(what: str, log_path: Path) -> str:
    log = read_log(log_path)
    first_error = find_first_error(log)
    lines = [what]
    if first_error is not None:
        lines.append(f"First error in its log: {first_error}")
    lines.append(f"The last lines of its log ({log_path}):")
    lines.append(take_last_lines(log, NUM_LOG_LINES) or "(the log is empty)")
    return "\n".join(lines)


def remove_shared_memory(log_path: Path) -> None:
    """Remove what the ranks of the vLLM that wrote this log have left in shared memory.

    Each leaves 4 MiB; in a container with a small /dev/shm that would stop a later start.
    """
    for prefix in find_shared_memory(read_log(log_path)):
        for path in SHARED_MEMORY_DIR.glob(f"{prefix}*"):
            path.unlink(missing_ok=True)
