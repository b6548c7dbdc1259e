"""The lines on the memory that a rank has for the KV cache."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_kvpp.explain.log_file import LogLine

GIB = 1024**3
_AMOUNT = r"(\d{1,9}(?:\.\d{1,9})?)"
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"Available KV cache memory: {_AMOUNT} GiB",
        rf"reserved {_AMOUNT} GiB memory for KV Cache as specified",
        rf"(?:Explicitly|Auto) set \({_AMOUNT}/[\d.]+\) GiB for KV cache on node",
    )
)


@dataclass(frozen=True)
class RankMemory:
    """KV cache memory of one rank, rounded to hundredths of a GiB as the log has it."""

    rank: str
    gib: float

    @property
    def num_bytes(self) -> int:
        """In bytes, as exact as the log is."""
        return int(self.gib * GIB)


def read_memories(lines: Iterable[LogLine]) -> tuple[RankMemory, ...]:
    """What each rank said last; of one node only the first rank may say it."""
    found: dict[str, RankMemory] = {}
    for line in lines:
        for pattern in _PATTERNS:
            if match := pattern.search(line.text):
                found[line.process] = RankMemory(line.process, float(match[1]))
    return tuple(found.values())
