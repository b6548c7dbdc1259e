"""KVPP's own lines: that it is on, and what the first rank of each group keeps."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_kvpp.explain.log_file import LogLine

_IS_ON = re.compile(r"KVPP is on: group size (\d{1,9})")
_HAS_NO_EFFECT = "enable_kvpp has no effect"
_RANK = re.compile(r"KVPP group rank (\d{1,9}) of (\d{1,9})")
_BLOCKS = re.compile(r" {2}blocks +([\d,]{1,20}) of (\d{1,9}) tokens")
_TOKENS = re.compile(r" {2}tokens +([\d,]{1,20}) \(without KVPP ([\d,]{1,20});")


@dataclass(frozen=True)
class KVPPRank:
    """What the block of one rank says; `num_tokens_without` is what its memory would hold without KVPP."""

    group_rank: int
    group_size: int
    num_blocks: int | None = None
    block_size: int | None = None
    num_tokens: int | None = None
    num_tokens_without: int | None = None


@dataclass(frozen=True)
class KVPPStart:
    """What KVPP said at the start; one rank for each pipeline stage."""

    group_size: int | None = None
    has_no_effect: bool = False
    ranks: tuple[KVPPRank, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether KVPP runs in this start."""
        return self.group_size is not None or bool(self.ranks)

    @property
    def fewest(self) -> KVPPRank | None:
        """The rank whose memory would hold the fewest tokens without KVPP: it would have decided."""
        complete = [rank for rank in self.ranks if rank.num_tokens is not None and rank.num_tokens_without is not None]
        return min(complete, key=lambda rank: rank.num_tokens_without or 0, default=None)


def read_kvpp_start(lines: Iterable[LogLine]) -> KVPPStart:
    """Read what KVPP says; blocks of several ranks may alternate."""
    group_size: int | None = None
    has_no_effect = False
    blocks: dict[str, list[str]] = {}
    latest = ""
    for line in lines:
        has_no_effect |= _HAS_NO_EFFECT in line.text
        if match := _IS_ON.search(line.text):
            group_size = int(match[1])
        elif _RANK.search(line.text):
            latest = line.process
            blocks[latest] = [line.text]
        # A log without vLLM's format names the process on a record's first line only.
        elif (process := line.process or latest) in blocks:
            blocks[process].append(line.text)
    ranks = tuple(_read_rank("\n".join(texts)) for texts in blocks.values())
    return KVPPStart(group_size, has_no_effect, ranks)


def _read_rank(text: str) -> KVPPRank:
    rank, blocks, tokens = (pattern.search(text) for pattern in (_RANK, _BLOCKS, _TOKENS))
    assert rank is not None, "a block without its first line"
    return KVPPRank(
        group_rank=int(rank[1]),
        group_size=int(rank[2]),
        num_blocks=_number(blocks[1]) if blocks else None,
        block_size=int(blocks[2]) if blocks else None,
        num_tokens=_number(tokens[1]) if tokens else None,
        num_tokens_without=_number(tokens[2]) if tokens else None,
    )


def _number(text: str) -> int:
    return int(text.replace(",", "") or 0)
