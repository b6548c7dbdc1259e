"""The lines of a log that speak of the KV cache, read as a stream and with limits."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vllm_kvpp.explain.errors import ExplainError

MIB = 1024 * 1024
LARGEST_LOG_BYTES = 64 * MIB
LONGEST_LINE_BYTES = MIB
STDIN = "-"
# What every line that is read further has in it; a server writes many others, like "KV cache usage" every ten seconds.
_MARKS = re.compile(
    rb"KV [Cc]ache size|KV cache memory|KV Cache as specified|for KV cache on node|Maximum concurrency"
    rb"|GPU blocks|num_gpu_blocks_override|non-default args|Initializing a V1 LLM engine|block size to \d"
    rb"|kv_cache_memory_bytes=|KVPP|enable_kvpp|bytes per block |  (?:blocks|tokens|memory) "
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROCESS = re.compile(r"\(([^()]{1,80}? pid=\d+)[^()]*\)")


@dataclass(frozen=True)
class LogLine:
    """One line without colours; `process` is like `Worker_TP0 pid=12`, empty where the line names none."""

    process: str
    text: str


@dataclass(frozen=True)
class LogExcerpt:
    """The lines that matter, in order; with `is_cut` the log is longer than what was read."""

    lines: tuple[LogLine, ...]
    is_cut: bool = False


def read_excerpt(source: str) -> LogExcerpt:
    """Read a log file, or the standard input for `-`.

    Raises:
        ExplainError: it cannot be read, or is no text.
    """
    try:
        with _open(source) as file:
            return _take_excerpt(file, source)
    except OSError as error:
        raise ExplainError(
            f"LOGFILE is {source}, which cannot be read ({error.strerror}); give the file that vLLM's output went to."
        ) from error
    except ValueError as error:
        # A path with a zero character in it.
        raise ExplainError(f"LOGFILE is {source[:80]!r}, which is no path ({error}).") from error


@contextmanager
def _open(source: str) -> Iterator[BinaryIO]:
    if source == STDIN:
        yield sys.stdin.buffer
        return
    with Path(source).open("rb") as file:
        yield file


def _take_excerpt(file: BinaryIO, source: str) -> LogExcerpt:
    found: list[LogLine] = []
    num_bytes = 0
    while num_bytes < LARGEST_LOG_BYTES and (line := file.readline(LONGEST_LINE_BYTES)):
        num_bytes += len(line)
        if b"\0" in line:
            raise ExplainError(f"LOGFILE is {source}, which is binary; give a log as plain text in UTF-8.")
        if _MARKS.search(line):
            found.append(parse_line(line.decode(errors="replace")))
    if num_bytes == 0:
        raise ExplainError(f"LOGFILE is {source}, which is empty; give the file that vLLM's output went to.")
    return LogExcerpt(tuple(found), is_cut=num_bytes >= LARGEST_LOG_BYTES and bool(file.read(1)))


def parse_line(line: str) -> LogLine:
    """Take off colours, and find the process that wrote the line."""
    text = _COLOURS.sub("", line).rstrip()
    process = _PROCESS.search(text)
    return LogLine(process[1] if process is not None else "", text)
