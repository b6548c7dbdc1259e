"""How much memory a rank keeps behind its caches to move things through (R-MEM-3: it is inside the budget).

```text
| caches … | exchange: decode queries and outputs | staging: scattered blocks, or the rest of a page |
```
"""

import mmap

from vllm_kvpp.errors import KVPPBudgetError
from vllm_kvpp.plan.cache_plan import CachePlan
from vllm_kvpp.plan.placement import align_range
from vllm_kvpp.selection import QueryShape, TransferMode

# Enough for a link to run at its full speed; more would only cost blocks.
LARGEST_DEFAULT_BYTES = 64 * 1024 * 1024
DEFAULT_SHARE = 64
EXCHANGE_SHARE = 128
# More rows than a decode step has, as a rule; a step with more moves history instead.
MOST_EXCHANGE_ROWS = 512


def plan_tail(
    plan: CachePlan,
    group_rank: int,
    available_bytes: int,
    *,
    transfer: TransferMode,
    shares_memory: bool,
    asked_bytes: int | None = None,
) -> int:
    """What one rank keeps behind its caches for transfers; the ranks of a group take the smallest of theirs.

    Raises:
        KVPPBudgetError: as `plan_staging`.
    """
    if shares_memory:
        # The last page of an allocation cannot be shared where it is not whole: it has to hold no cache.
        return mmap.PAGESIZE
    if transfer == "full":
        return 0
    return plan_staging(plan, group_rank, available_bytes, asked_bytes)


def plan_exchange(queries: QueryShape | None, available_bytes: int) -> int:
    """The bytes in which one rank exchanges decode queries and outputs; a group takes the smallest of its ranks'.

    `queries` is None where decode rows never attend at the owner; then, and in a budget too small for one row, it is 0.
    """
    if queries is None:
        return 0
    row_bytes = queries.exchange_row_bytes
    wanted = min(available_bytes // EXCHANGE_SHARE, MOST_EXCHANGE_ROWS * row_bytes)
    # Whole rows, and what lies behind begins where it would without.
    return align_range(wanted // row_bytes * row_bytes)


def plan_staging(plan: CachePlan, group_rank: int, available_bytes: int, asked_bytes: int | None) -> int:
    """The bytes of the staging memory of one rank: those asked for, or a small share of the available ones.

    Without an explicit size, a budget too small for it gives 0: then nothing is staged.

    Raises:
        KVPPBudgetError: the size asked for holds no block of the largest bundle, or leaves no block for the cache.
    """
    smallest = plan.largest_bundle_page_bytes
    largest = available_bytes - plan.bytes_per_block(group_rank).total
    if asked_bytes is None:
        default = max(smallest, min(LARGEST_DEFAULT_BYTES, available_bytes // DEFAULT_SHARE))
        return default if default <= largest // 2 else 0
    if not smallest <= asked_bytes <= largest:
        raise KVPPBudgetError(
            f"kvpp.staging_mib is {_mib(asked_bytes)}, but it has to be between {_mib(smallest)} (one block of the "
            f"largest layer) and {_mib(largest)} (which leaves one block to the KV cache of {_mib(available_bytes)} "
            "MiB). Leave it out to let KVPP choose."
        )
    return asked_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**2:.6g}"
