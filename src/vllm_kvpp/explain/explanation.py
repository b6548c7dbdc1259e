"""A log explained: which start, what it says, what follows from it, and what KVPP would change."""

from dataclasses import dataclass

from vllm_kvpp.explain.errors import ExplainError
from vllm_kvpp.explain.figures import PoolBlocks, find_blocks
from vllm_kvpp.explain.gain import Gain, Hints, find_block_size, plan_gain
from vllm_kvpp.explain.log_file import LARGEST_LOG_BYTES, MIB, LogExcerpt
from vllm_kvpp.explain.pool_lines import Pool
from vllm_kvpp.explain.startup import Startup, read_startups

LOOKED_FOR = "'KV cache size: … tokens', 'Maximum concurrency for …' and 'Available KV cache memory: …'"


@dataclass(frozen=True)
class Explanation:
    """Everything that is printed. `gain` is None where KVPP is on already: the log says what it gives."""

    source: str
    num_starts: int
    startup: Startup
    blocks: PoolBlocks | None
    gain: Gain | None
    notes: tuple[str, ...]

    @property
    def pool(self) -> Pool | None:
        """The cache of the first engine."""
        return self.startup.pools[0] if self.startup.pools else None


def explain(source: str, excerpt: LogExcerpt, hints: Hints) -> Explanation:
    """Explain the last start in the log that has figures.

    Raises:
        ExplainError: there is none, or the model that the user named cannot be read.
    """
    startups = read_startups(excerpt.lines)
    if not startups:
        part = f" in its first {LARGEST_LOG_BYTES // MIB} MiB" if excerpt.is_cut else ""
        raise ExplainError(
            f"LOGFILE is {source}, which has none of vLLM's start-up lines{part}; looked for {LOOKED_FOR}. Give the "
            "output of a server's start at log level INFO."
        )
    startup = startups[-1]
    gain = None if startup.kvpp.is_on else plan_gain(startup, hints)
    block_size, block_notes = find_block_size(startup, hints)
    blocks = None
    # Only of a cache that KVPP can plan is it known that all layers take blocks alike.
    if startup.pools and (gain is None or gain.plan is not None):
        blocks = find_blocks(startup.pools[0], block_size)
    notes = _list_notes(excerpt, len(startups), gain, block_notes)
    return Explanation(source, len(startups), startup, blocks, gain, notes)


def _list_notes(
    excerpt: LogExcerpt, num_starts: int, gain: Gain | None, block_notes: tuple[str, ...]
) -> tuple[str, ...]:
    notes: list[str] = []
    if num_starts > 1:
        notes.append(f"The log has {num_starts} starts; this is the last one.")
    if excerpt.is_cut:
        notes.append(f"The log is longer than {LARGEST_LOG_BYTES // MIB} MiB; only that much of it was read.")
    notes += gain.assumptions if gain is not None else block_notes
    return tuple(notes)
