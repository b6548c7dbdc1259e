"""Ctrl-C and SIGTERM, delivered only where the demo waits, so that they cannot fall between a start and its end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The user, or the system, asked the demo to stop.

    A `KeyboardInterrupt`, because asyncio swallows other exceptions that a signal handler raises.
    """

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(signal.Signals(signal_number).name)

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process ended by this signal: 130 for Ctrl-C."""
        return 128 + self.signal_number


class Interrupts:
    """While entered, signals are noted, and raised as `Interrupted` inside `allowed()` only.

    Everything else, in particular starting and stopping a server, runs to its end.
    """

    def __init__(self) -> None:
        self._is_allowed = False
        self._noted: int | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Interrupts":
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A section that a signal may end, one that has been noted before included."""
        self._is_allowed = True
        try:
            self._raise_noted()
            yield
        finally:
            self._is_allowed = False

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        is_first = self._noted is None
        self._noted = number if self._noted is None else self._noted
        if is_first and self._is_allowed:
            # A second signal has nothing to add: the end of the demo is under way, and takes bounded time.
            raise Interrupted(number)

    def _raise_noted(self) -> None:
        if self._noted is not None:
            raise Interrupted(self._noted)
