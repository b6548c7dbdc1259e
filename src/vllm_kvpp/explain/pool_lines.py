"""The lines on what the KV cache holds: tokens, and how many of the longest requests."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvpp.explain.log_file import LogLine

# vLLM 0.32 writes both figures on one line, earlier releases on two.
_SIZE = re.compile(r"KV cache size: ([\d,]{1,20}) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]{1,20}) tokens per request: (\d{1,12}(?:\.\d{1,6})?)x")
_OVERRIDE = re.compile(r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(\d{1,15})")
# Before vLLM's V1 engine.
_BLOCKS = re.compile(r"GPU blocks: ([\d,]{1,20})")


@dataclass(frozen=True)
class Pool:
    """The KV cache of one engine, which is one data-parallel replica."""

    engine: str
    num_tokens: int | None = None
    max_model_len: int | None = None
    concurrency: float | None = None
    num_blocks: int | None = None


def read_pools(lines: Iterable[LogLine]) -> tuple[Pool, ...]:
    """One pool for each engine, in the order in which they are first named."""
    pools: dict[str, Pool] = {}
    for line in lines:
        if found := _read_line(line.text):
            pools[line.process] = replace(pools.get(line.process, Pool(line.process)), **found)
    # Alone, a number of blocks says nothing yet.
    return tuple(pool for pool in pools.values() if pool.num_tokens or pool.concurrency)


def _read_line(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if size := _SIZE.search(text):
        found["num_tokens"] = _number(size[1])
    if concurrency := _CONCURRENCY.search(text):
        found["max_model_len"] = _number(concurrency[1])
        found["concurrency"] = float(concurrency[2])
    if blocks := _OVERRIDE.search(text) or _BLOCKS.search(text):
        found["num_blocks"] = _number(blocks[1])
    return found


def _number(text: str) -> int:
    return int(text.replace(",", "") or 0)
