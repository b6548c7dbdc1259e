"""A scheduler in small: requests, block tables, prefix hits, preemption, and blocks used again."""

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

BLOCK_SIZE = 4
# As in vLLM, block 0 belongs to nobody; dummy runs use it.
NULL_BLOCK = 0


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step: its new tokens, behind `num_computed_tokens` earlier ones.

    `num_known_blocks` of its blocks were named in earlier steps; 0 for a new request, and for one that begins anew.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    block_table: tuple[int, ...]
    num_known_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache once the step is done."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def history_blocks(self) -> tuple[int, ...]:
        """The blocks that hold tokens of earlier steps."""
        return self.block_table[: -(-self.num_computed_tokens // BLOCK_SIZE)]


@dataclass(frozen=True)
class Abort:
    """Where a forward raises: at a target layer by its place in execution order, before or after its wait."""

    target_index: int
    has_waited: bool


@dataclass(frozen=True)
class ToyStep:
    """One forward; a dummy run does not come from the scheduler. `finished` requests have ended before it."""

    requests: tuple[ScheduledRequest, ...]
    abort: Abort | None = None
    is_dummy: bool = False
    finished: tuple[str, ...] = ()

    @property
    def has_history(self) -> bool:
        """Whether some request reads tokens of an earlier forward."""
        return any(request.num_computed_tokens > 0 for request in self.requests)

    @property
    def active_blocks(self) -> frozenset[int]:
        """The blocks that hold the batch's history."""
        return frozenset(block_id for request in self.requests for block_id in request.history_blocks)

    def repeat(self) -> "ToyStep":
        """The same step scheduled once more: all its blocks are known."""
        requests = (replace(request, num_known_blocks=len(request.block_table)) for request in self.requests)
        return replace(self, requests=tuple(requests), finished=())


@dataclass
class _Request:
    token_ids: list[int]
    num_known_blocks: int = 0
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)


class ToyScheduler:
    """Writes down the `steps` that its calls add up to; freed blocks are used again, oldest first, as in vLLM."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.steps: list[ToyStep] = []
        self._free = deque(range(NULL_BLOCK + 1, num_blocks))
        self._requests: dict[str, _Request] = {}
        self._finished: list[str] = []
        self._num_users = dict.fromkeys(range(num_blocks), 0)
        self._block_by_prefix: dict[tuple[int, ...], int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    @property
    def request_ids(self) -> list[str]:
        """Requests that are waiting or running."""
        return list(self._requests)

    def num_uncomputed_tokens(self, request_id: str) -> int:
        """Known tokens that no forward has computed, at least the one that a decode would add."""
        request = self._requests[request_id]
        return max(len(request.token_ids) - request.num_computed_tokens, 1)

    def add(self, request_id: str, prompt: Sequence[int]) -> None:
        """Accept a request; it starts behind the full blocks that others have computed for the same tokens."""
        self._requests[request_id] = _Request(list(prompt))

    def step(self, num_tokens: Mapping[str, int], abort: Abort | None = None) -> ToyStep:
        """Schedule that many tokens of each request; behind the prompt they count as decoded.

        After an aborted step the requests stand where they were, with the blocks they got.
        """
        scheduled = tuple(self._schedule(request_id, count) for request_id, count in num_tokens.items())
        self.steps.append(ToyStep(scheduled, abort, finished=tuple(self._finished)))
        self._finished.clear()
        if abort is None:
            for request in scheduled:
                self._requests[request.request_id].num_computed_tokens = request.num_tokens
                self._remember_full_blocks(request.request_id)
        return self.steps[-1]

    def dummy_step(self) -> None:
        """A forward with made-up tokens, outside of any scheduling."""
        dummy = ScheduledRequest("dummy", (1, 2, 3), 0, (NULL_BLOCK,))
        self.steps.append(ToyStep((dummy,), is_dummy=True))

    def preempt(self, request_id: str) -> None:
        """Take a request's blocks away; its next step computes what it has lost."""
        self._release(self._requests[request_id])

    def finish(self, request_id: str) -> None:
        """Forget a request; its blocks are free for others."""
        self._release(self._requests.pop(request_id))
        self._finished.append(request_id)

    def _schedule(self, request_id: str, count: int) -> ScheduledRequest:
        request = self._requests[request_id]
        if not request.block_table:
            self._take_prefix(request)
        end = request.num_computed_tokens + count
        while len(request.token_ids) < end:
            request.token_ids.append(zlib.crc32(f"{request_id} {len(request.token_ids)}".encode()))
        while len(request.block_table) * BLOCK_SIZE < end:
            request.block_table.append(self._take_block())
        num_known_blocks, request.num_known_blocks = request.num_known_blocks, len(request.block_table)
        return ScheduledRequest(
            request_id,
            tuple(request.token_ids[request.num_computed_tokens : end]),
            request.num_computed_tokens,
            tuple(request.block_table),
            num_known_blocks,
        )

    def _take_prefix(self, request: _Request) -> None:
        # Not the last token: a request with nothing left to compute would have no output.
        for end in range(BLOCK_SIZE, len(request.token_ids), BLOCK_SIZE):
            block_id = self._block_by_prefix.get(tuple(request.token_ids[:end]))
            if block_id is None:
                return
            if self._num_users[block_id] == 0:
                self._free.remove(block_id)
            self._num_users[block_id] += 1
            request.block_table.append(block_id)
            request.num_computed_tokens = end

    def _take_block(self) -> int:
        block_id = self._free.popleft()
        self._num_users[block_id] = 1
        self._block_by_prefix = {prefix: other for prefix, other in self._block_by_prefix.items() if other != block_id}
        return block_id

    def _remember_full_blocks(self, request_id: str) -> None:
        request = self._requests[request_id]
        for index in range(request.num_computed_tokens // BLOCK_SIZE):
            prefix = tuple(request.token_ids[: (index + 1) * BLOCK_SIZE])
            self._block_by_prefix.setdefault(prefix, request.block_table[index])

    def _release(self, request: _Request) -> None:
        for block_id in reversed(request.block_table):
            self._num_users[block_id] -= 1
            if self._num_users[block_id] == 0:
                self._free.append(block_id)
        request.block_table = []
        request.num_known_blocks = 0
        request.num_computed_tokens = 0
