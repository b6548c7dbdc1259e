"""What one step moves of every bundle, in which way and at what cost: plain values, shared by plan and transports."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal

TransferMode = Literal["auto", "full", "active"]
DecodeMode = Literal["auto", "in_place", "owner", "transfer"]


@dataclass(frozen=True)
class BlockRuns:
    """A set of block ids, as half-open runs `[first, end)`: sorted, disjoint, and with a gap between any two."""

    runs: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(block_ids: Iterable[int]) -> "BlockRuns":
        """Gather ids, in any order and with repetitions, into runs."""
        runs: list[tuple[int, int]] = []
        first = end = -1
        for block_id in sorted(set(block_ids)):
            if block_id != end:
                if end > first:
                    runs.append((first, end))
                first = block_id
            end = block_id + 1
        if end > first:
            runs.append((first, end))
        return BlockRuns(tuple(runs))

    @cached_property
    def num_blocks(self) -> int:
        """Blocks in all runs."""
        return sum(end - first for first, end in self.runs)

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __iter__(self) -> Iterator[int]:
        """The block ids, ascending."""
        for first, end in self.runs:
            yield from range(first, end)

    def split(self, max_blocks: int) -> tuple["BlockRuns", ...]:
        """Cut into sets of at most `max_blocks` blocks, in order."""
        assert max_blocks > 0, "a set of no blocks"
        parts: list[list[tuple[int, int]]] = []
        room = 0
        for first, end in self.runs:
            start = first
            while start < end:
                if room == 0:
                    parts.append([])
                    room = max_blocks
                stop = min(end, start + room)
                parts[-1].append((start, stop))
                room -= stop - start
                start = stop
        return tuple(BlockRuns(tuple(part)) for part in parts)


class Way(Enum):
    """How a bundle's blocks travel."""

    WHOLE = "whole"
    """Every allocated block, as one range of bytes."""
    RUNS = "runs"
    """Each run of consecutive blocks by itself, component by component."""
    STAGED = "staged"
    """Gathered into staging memory at the owner, sent, and scattered to the same block ids at the receivers."""


@dataclass(frozen=True)
class Selection:
    """The blocks that a step moves of every bundle; with `Way.WHOLE` all of them, whatever `blocks` says."""

    way: Way
    blocks: BlockRuns


@dataclass(frozen=True)
class LinkTraits:
    """What a transport pays beside the bytes on its link, in bytes that the link carries in the same time.

    `call_bytes` is the price of one call, `layer_bytes` that of starting one layer's transfer and waiting for it, and
    `staging_factor` that of gathering and scattering one byte. `blocks_per_chunk` says how many blocks of any bundle
    its staging memory takes at once; 0 if it has none.
    """

    call_bytes: int
    layer_bytes: int = 0
    staging_factor: float = 0.0
    blocks_per_chunk: int = 0


@dataclass(frozen=True)
class ExchangeTraits:
    """What attending at the owner costs, in bytes that the link of a `LinkTraits` beside it carries in the same time.

    `layer_bytes` is the price of one layer's gather and scatter beside their bytes; `head_token_bytes` that of
    attending one more head to one token, because the owner does so for the other ranks while these wait.
    """

    layer_bytes: int
    head_token_bytes: float = 0.0


@dataclass(frozen=True)
class QueryShape:
    """The decode queries and outputs of a stage's attentions, which are equally wide in all of them.

    `num_heads` are those of all ranks of the group together, `query_width` and `output_width` elements of one head.
    `num_choices` is how many tokens an indexer chooses for a row, 0 where there are no indexers.
    """

    num_heads: int
    group_size: int
    query_width: int
    output_width: int
    element_bytes: int
    num_choices: int = 0

    @property
    def heads_per_rank(self) -> int:
        """Heads of one rank."""
        return self.num_heads // self.group_size

    @property
    def num_peer_heads(self) -> int:
        """Heads that an owner attends for the other ranks."""
        return self.num_heads - self.heads_per_rank

    @property
    def head_bytes(self) -> int:
        """Query and output of one head of one row."""
        return (self.query_width + self.output_width) * self.element_bytes

    @property
    def choice_bytes(self) -> int:
        """What an indexer chooses for one row, in numbers of four bytes."""
        return 4 * self.num_choices

    @property
    def exchange_row_bytes(self) -> int:
        """What a rank keeps for one row: its own heads, all ranks' by row and by rank, and choices.

        Queries and outputs take turns in the same memory: a query has been read when its output arrives.
        """
        width = max(self.query_width, self.output_width)
        return (self.heads_per_rank + 2 * self.num_heads) * width * self.element_bytes + self.choice_bytes


@dataclass(frozen=True)
class TransferSeconds:
    """How long one transfer took on a rank, and how long the rank's compute stood still for it."""

    total: float
    waited: float
