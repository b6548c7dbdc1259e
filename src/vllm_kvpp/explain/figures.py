"""What follows from the figures of a pool: its blocks, and how many of the longest requests really run at once."""

from dataclasses import dataclass
from math import ceil

from vllm_kvpp.explain.pool_lines import Pool

# Concurrency is printed with two decimals.
_ROUNDING = 0.005 + 1e-9


@dataclass(frozen=True)
class PoolBlocks:
    """The blocks of a pool in which each request takes blocks of one kind, as in MLA models.

    `per_request` are those of a request of `max_model_len` tokens.
    """

    num_blocks: int
    block_size: int
    per_request: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks hold when all are full."""
        return self.num_blocks * self.block_size

    @property
    def num_usable_blocks(self) -> int:
        """Blocks for requests: vLLM holds one back, as the block that stands for none."""
        return max(self.num_blocks - 1, 0)

    @property
    def num_longest_requests(self) -> int:
        """Requests of `max_model_len` tokens that run at once."""
        return self.num_usable_blocks // self.per_request

    @property
    def wasted_tokens(self) -> int:
        """What stays empty in the last block of a request of `max_model_len` tokens."""
        return self.per_request * self.block_size - self.max_model_len


def is_derived_from_concurrency(pool: Pool) -> bool:
    """Whether the token figure is the concurrency times `max_model_len`, as vLLM 0.32 computes it, up to rounding."""
    if pool.num_tokens is None or not pool.max_model_len or pool.concurrency is None:
        return False
    return abs(pool.num_tokens / pool.max_model_len - pool.concurrency) <= _ROUNDING + 1 / pool.max_model_len


def find_blocks(pool: Pool, block_size: int | None) -> PoolBlocks | None:
    """Work back to the number of blocks; None where the figures leave it open, or contradict `block_size`.

    It holds for a cache whose layers all keep the whole history, without decode context parallelism.
    """
    if not block_size or not pool.max_model_len or pool.concurrency is None:
        return None
    per_request = ceil(pool.max_model_len / block_size)
    num_blocks = pool.num_blocks or _count_blocks(pool, block_size, per_request)
    if num_blocks is None or abs(num_blocks / per_request - pool.concurrency) > _ROUNDING:
        return None
    return PoolBlocks(num_blocks, block_size, per_request, pool.max_model_len)


def show_tokens(num_blocks: int, per_request: int, max_model_len: int) -> int:
    """The token figure that vLLM 0.32 prints for so many blocks."""
    # Divided first, as vLLM does: the rounding of floats is part of the figure.
    return int(num_blocks / per_request * max_model_len)


def _prints(pool: Pool, num_blocks: int, per_request: int) -> bool:
    assert pool.max_model_len is not None
    assert pool.concurrency is not None
    has_tokens = show_tokens(num_blocks, per_request, pool.max_model_len) == pool.num_tokens
    return has_tokens and abs(num_blocks / per_request - pool.concurrency) <= _ROUNDING


def _count_blocks(pool: Pool, block_size: int, per_request: int) -> int | None:
    if pool.num_tokens is None or not pool.max_model_len:
        return None
    if is_derived_from_concurrency(pool):
        fewest = ceil(pool.num_tokens * per_request / pool.max_model_len)
        # Floats may have lost the last token; then it is the concurrency that tells two candidates apart.
        return next((found for found in (fewest, fewest + 1) if _prints(pool, found, per_request)), None)
    # Earlier releases print blocks times block size.
    return pool.num_tokens // block_size if pool.num_tokens % block_size == 0 else None
