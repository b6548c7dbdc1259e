"""What a step reads of earlier steps, from the scheduler's output alone, so the same on every rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_kvpp.errors import KVPPOrderError
from vllm_kvpp.selection import BlockRuns


@dataclass(frozen=True)
class RequestUpdate:
    """What the scheduler says of one request: tokens computed so far, and blocks.

    `block_ids` follow the request's known blocks, or take their place if `replaces_blocks`. Only a request with
    `is_scheduled` takes part in the step.
    """

    request_id: str
    num_computed_tokens: int
    block_ids: Sequence[int] = ()
    replaces_blocks: bool = False
    is_scheduled: bool = True


@dataclass(frozen=True)
class ScheduleUpdate:
    """One output of the scheduler; `finished` requests have ended before it."""

    requests: Sequence[RequestUpdate] = ()
    finished: Iterable[str] = ()


@dataclass(frozen=True)
class Step:
    """One forward: the blocks that hold its requests' history."""

    active_blocks: BlockRuns = field(default_factory=BlockRuns)

    @property
    def has_history(self) -> bool:
        """Whether any scheduled request reads tokens of an earlier forward (R-RUN-1)."""
        return bool(self.active_blocks)


class BlockTables:
    """The blocks of every request that has not finished, kept up to date by the scheduler's outputs."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[str, list[int]] = {}
        # Most decode steps read the same blocks as the one before: the last answer, and what it was an answer to.
        self._version = 0
        self._last_question: tuple[int, tuple[tuple[str, int], ...]] = (0, ())
        self._last_step = Step()

    def advance(self, update: ScheduleUpdate) -> Step:
        """Take over one output, and say what its step reads: the first blocks of each request, up to its history.

        Raises:
            KVPPOrderError: a request has more computed tokens than its blocks hold, or was never announced.
        """
        for request_id in update.finished:
            self._blocks.pop(request_id, None)
        for request in update.requests:
            self._take_blocks(request)
        return self._find_step(
            tuple(
                (request.request_id, -(-request.num_computed_tokens // self._block_size))
                for request in update.requests
                if request.is_scheduled and request.num_computed_tokens > 0
            )
        )

    def _take_blocks(self, request: RequestUpdate) -> None:
        if request.replaces_blocks:
            self._blocks[request.request_id] = list(request.block_ids)
            self._version += 1
        elif request.request_id not in self._blocks:
            raise KVPPOrderError(f"Request {request.request_id} goes on, but KVPP has not seen it begin.")
        elif request.block_ids:
            # Blocks behind the history do not change what was read so far.
            self._blocks[request.request_id] += request.block_ids

    def _find_step(self, num_blocks: tuple[tuple[str, int], ...]) -> Step:
        question = (self._version, num_blocks)
        if question != self._last_question:
            blocks: set[int] = set()
            for request_id, count in num_blocks:
                blocks.update(self._history_blocks(request_id, count))
            self._last_question, self._last_step = question, Step(BlockRuns.of(blocks))
        return self._last_step

    def _history_blocks(self, request_id: str, count: int) -> Sequence[int]:
        blocks = self._blocks[request_id]
        if count > len(blocks):
            raise KVPPOrderError(
                f"The history of request {request_id} takes {count} blocks of {self._block_size} tokens, but the "
                f"scheduler has named {len(blocks)}."
            )
        return blocks[:count]
