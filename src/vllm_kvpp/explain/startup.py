"""One start of vLLM, as its log tells it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_kvpp.explain.kvpp_lines import KVPPStart, read_kvpp_start
from vllm_kvpp.explain.log_file import LogLine
from vllm_kvpp.explain.memory_lines import RankMemory, read_memories
from vllm_kvpp.explain.pool_lines import Pool, read_pools
from vllm_kvpp.explain.settings_lines import ARGUMENTS, ENGINE, Settings, read_settings


@dataclass(frozen=True)
class Startup:
    """What one start said; whatever its log leaves out is None or empty."""

    settings: Settings
    memories: tuple[RankMemory, ...]
    pools: tuple[Pool, ...]
    kvpp: KVPPStart

    @property
    def smallest_memory(self) -> RankMemory | None:
        """The rank with the least KV cache memory of those that say it."""
        return min(self.memories, key=lambda memory: memory.num_bytes, default=None)

    @property
    def has_figures(self) -> bool:
        """Whether there is anything to explain."""
        return bool(self.pools or self.memories)


def read_startups(lines: Iterable[LogLine]) -> tuple[Startup, ...]:
    """Every start in the log that has figures, in order."""
    startups = (_read_startup(part) for part in split_starts(lines))
    return tuple(startup for startup in startups if startup.has_figures)


def split_starts(lines: Iterable[LogLine]) -> tuple[tuple[LogLine, ...], ...]:
    """Cut the log where a server says its arguments, or where an engine of a name that was there begins anew."""
    parts: list[list[LogLine]] = [[]]
    for line in lines:
        if _begins_anew(line, parts[-1]):
            parts.append([])
        parts[-1].append(line)
    return tuple(tuple(part) for part in parts if part)


def _begins_anew(line: LogLine, part: Sequence[LogLine]) -> bool:
    if ARGUMENTS in line.text:
        return any(ARGUMENTS in earlier.text or ENGINE in earlier.text for earlier in part)
    if ENGINE in line.text:
        return any(ENGINE in earlier.text and _name(earlier) == _name(line) for earlier in part)
    return False


def _name(line: LogLine) -> str:
    return line.process.partition(" pid=")[0]


def _read_startup(lines: Sequence[LogLine]) -> Startup:
    return Startup(
        settings=read_settings(lines),
        memories=read_memories(lines),
        pools=read_pools(lines),
        kvpp=read_kvpp_start(lines),
    )
