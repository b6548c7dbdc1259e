"""From the words behind `vllm-kvpp doctor` to the arguments of the server that they start."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from vllm_kvpp.doctor.errors import DoctorError
from vllm_kvpp.vllm_seam.findings import ServeCommand

EXAMPLE = "vllm-kvpp doctor -- vllm serve MODEL --tensor-parallel-size 2"
SERVER_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.entry")
CLI_MODULE = "vllm.entrypoints.cli.main"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"python[\d.]*")


@dataclass(frozen=True)
class TypedCommand:
    """The server's arguments, and the environment variables that were set in front of it."""

    command: ServeCommand
    environment: Mapping[str, str] = field(default_factory=dict)


def read_words(words: Sequence[str]) -> TypedCommand | None:
    """Find the server in `words`, as they come from the shell, or as one quoted string; None if there are none.

    Raises:
        DoctorError: they start something else than a server, or quotes are not closed.
    """
    words = _split(words)
    if not words:
        return None
    environment, words = _take_assignments(words)
    return TypedCommand(_find_server(words), environment)


def _split(words: Sequence[str]) -> tuple[str, ...]:
    if len(words) != 1 or not re.search(r"\s", words[0].strip()):
        return tuple(word for word in words if word.strip())
    try:
        return tuple(shlex.split(words[0]))
    except ValueError as error:
        raise DoctorError(f"The command line {words[0][:80]!r} cannot be read ({error}); close its quotes.") from error


def _take_assignments(words: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    if words[0] == "env":
        words = words[1:]
    environment: dict[str, str] = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, environment[name] = words[0].partition("=")
        words = words[1:]
    if not words:
        raise DoctorError(f"The command line sets variables and starts nothing; use {EXAMPLE}.")
    return environment, words


def _find_server(words: Sequence[str]) -> ServeCommand:
    program = PurePath(words[0]).name
    if _PYTHON.fullmatch(program):
        return _find_module(words)
    if program == "vllm":
        return _find_subcommand(words[1:])
    if words[0] == "serve":
        return ServeCommand(arguments=tuple(words[1:]))
    if any(PurePath(word).name == "vllm" for word in words[1:]):
        raise DoctorError(f"The command line starts {program[:80]!r}; leave out what stands before vllm: {EXAMPLE}.")
    return ServeCommand(arguments=tuple(words))


def _find_subcommand(words: Sequence[str]) -> ServeCommand:
    if not words or words[0] != "serve":
        found = f"vllm {words[0][:80]}" if words else "vllm alone"
        raise DoctorError(f"The command line is {found}, which starts no server; use {EXAMPLE}.")
    return ServeCommand(arguments=tuple(words[1:]))


def _find_module(words: Sequence[str]) -> ServeCommand:
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else None
    if module == CLI_MODULE:
        return _find_subcommand(words[words.index("-m") + 2 :])
    if module not in SERVER_MODULES:
        raise DoctorError(f"The command line runs Python, but not -m {SERVER_MODULES[0]}; use that, or {EXAMPLE}.")
    return ServeCommand(arguments=tuple(words[words.index("-m") + 2 :]))
