"""A process with everything it starts, ended as a whole."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from vllm_kvpp.demo.errors import DemoError

POLL_SECONDS = 0.1
ORPHAN_SECONDS = 2.0
KILL_SECONDS = 10.0


class ProcessTree:
    """A command in a session of its own, its children, and what they leave behind when they die first.

    Members are found as descendants of the root and by the session, which orphans keep.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path) -> None:
        with log_path.open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches the demo, which then ends the tree in order.
            self._root = psutil.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._session_id: int = self._root.pid
        self._members: dict[int, psutil.Process] = {self._root.pid: self._root}

    @property
    def exit_code(self) -> int | None:
        """How the root ended, None while it runs."""
        code: int | None = self._root.poll()
        return code

    def refresh(self) -> None:
        """Note new members; called while waiting, so that one that leaves the session is known too."""
        for process in (*_list_children(self._root), *_list_session(self._session_id)):
            self._members.setdefault(process.pid, process)

    def list_running(self) -> tuple[psutil.Process, ...]:
        """The members that still run; a zombie does not."""
        self.refresh()
        self._root.poll()
        return tuple(process for process in self._members.values() if _is_running(process))

    def stop(self, *, grace_seconds: float) -> None:
        """Ask the root to end everything, wait, and kill what stays.

        Raises:
            DemoError: something could not be killed.
        """
        self.refresh()
        _send(self._root.terminate)
        self._wait_for_end(grace_seconds, of_root_only=True)
        # The root ends its children before itself; what is left now has lost it.
        for process in self.list_running():
            _send(process.terminate)
        self._wait_for_end(min(grace_seconds, ORPHAN_SECONDS))
        for process in self.list_running():
            _send(process.kill)
        self._wait_for_end(KILL_SECONDS)
        if left := self.list_running():
            pids = ", ".join(str(process.pid) for process in left)
            raise DemoError(f"These processes could not be ended: {pids}. End them by hand.")

    def _wait_for_end(self, seconds: float, *, of_root_only: bool = False) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            running = self.list_running()
            if not running or (of_root_only and self._root not in running):
                return
            time.sleep(POLL_SECONDS)


def _list_children(root: psutil.Process) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children


def _list_session(session_id: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _find_session(process.pid) == session_id]


def _find_session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _send(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        return
