"""What an inspection of the installed vLLM asks and answers, in plain values that cross a process border."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

# What a server with a command line would do: run without KVPP; run with it; run without it although it is asked for,
# since the group has one rank, or since nobody reads the flag; stop with KVPP's reasons; stop with vLLM's own; stop
# since the command line cannot be read.
Outcome = Literal["off", "on", "no effect", "not loaded", "refused", "refused by vLLM", "malformed"]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServeCommand(_Plain):
    """The arguments behind `vllm serve`, or behind a module that does the same."""

    arguments: tuple[str, ...]


class Verdict(_Plain):
    """What a server would do, and why.

    `decode_obstacle` is why decode tokens could not attend at the owner, and `in_place_obstacle` why ranks could not
    read the owner's memory in place, as far as that is known before a start.
    """

    outcome: Outcome
    reasons: tuple[str, ...] = ()
    model: str | None = None
    architecture: str | None = None
    group_size: int | None = None
    options: dict[str, Any] = {}
    worker: str | None = None
    attention_backend: str | None = None
    decode_obstacle: str | None = None
    in_place_obstacle: str | None = None
    messages: tuple[str, ...] = ()


class Findings(_Plain):
    """What the installed vLLM is, as far as it could be asked; `error` says how far that was."""

    error: str | None = None
    platform: str | None = None
    device: str | None = None
    attention_backend: str | None = None
    is_attached: bool = False
    attach_error: str | None = None
    num_symbols: int = 0
    faults: tuple[str, ...] = ()
    doctor_faults: tuple[str, ...] = ()
    verdict: Verdict | None = None


def describe_error(error: BaseException) -> str:
    """One line: what was raised, and its message without the pages that pydantic and Python add."""
    message = str(error)
    if isinstance(error, ValidationError):
        message = "; ".join(detail["msg"] for detail in error.errors())
    return f"{type(error).__name__}: {' '.join(message.split())[:800]}"
