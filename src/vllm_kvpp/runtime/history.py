"""What a step reads of earlier steps, from the scheduler's output alone, so the same on every rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_kvpp.errors import KVPPOrderError
from vllm_kvpp.selection import BlockRuns


@dataclass(frozen=True)
class RequestUpdate:
    """What the scheduler says of one request: tokens computed so far, and blocks.

    `block_ids` follow the request's known blocks, or take their place if `replaces_blocks`. Only a request with
    `num_tokens` to compute takes part in the step.
    """

    request_id: str
    num_computed_tokens: int
    block_ids: Sequence[int] = ()
    replaces_blocks: bool = False
    num_tokens: int = 1


@dataclass(frozen=True)
class ScheduleUpdate:
    """One output of the scheduler; `finished` requests have ended before it."""

    requests: Sequence[RequestUpdate] = ()
    finished: Iterable[str] = ()


@dataclass(frozen=True)
class StepRequest:
    """One request of a step: tokens to compute, tokens computed before, and its blocks, the first for these."""

    num_tokens: int
    num_computed_tokens: int
    num_history_blocks: int
    blocks: Sequence[int]

    @property
    def history_blocks(self) -> Sequence[int]:
        """The blocks of the tokens computed before."""
        return self.blocks[: self.num_history_blocks]


@dataclass(frozen=True)
class DecodeRows:
    """The part of a batch that attends by the decode path: whole requests, and their tokens, one row each."""

    num_requests: int
    num_rows: int


@dataclass(frozen=True)
class DecodeShare:
    """What a step has to do if its decode rows attend to the owners' memory.

    `num_attended_tokens` is the number of pairs of a row and a token that it attends to; `other_blocks` hold the
    history of the other requests, of which `has_others` says whether there are any.
    """

    num_rows: int
    num_attended_tokens: int
    other_blocks: BlockRuns
    has_others: bool


@dataclass(frozen=True)
class Step:
    """One forward: its requests, and the blocks that hold their history."""

    active_blocks: BlockRuns = field(default_factory=BlockRuns)
    requests: Sequence[StepRequest] = ()

    @property
    def has_history(self) -> bool:
        """Whether any scheduled request reads tokens of an earlier forward (R-RUN-1)."""
        return bool(self.active_blocks)

    def split_decodes(self, rows: DecodeRows, *, most_attended: int | None = None) -> DecodeShare | None:
        """Find the requests that decode: those with the fewest tokens.

        A row attends to at most `most_attended` tokens, as with sparse attention; None if to all before it.
        Returns None if the schedule leaves open which they are, because another has as few, or if it says something
        else than `rows`. Whoever asks on another rank gets the same answer.
        """
        ordered = sorted(self.requests, key=lambda request: request.num_tokens)
        decodes, others = ordered[: rows.num_requests], ordered[rows.num_requests :]
        is_open = bool(decodes and others) and decodes[-1].num_tokens == others[0].num_tokens
        is_all = len(decodes) == rows.num_requests > 0
        if is_open or not is_all or sum(request.num_tokens for request in decodes) != rows.num_rows:
            return None
        return DecodeShare(
            num_rows=rows.num_rows,
            num_attended_tokens=sum(_count_attended(request, most_attended) for request in decodes),
            other_blocks=BlockRuns.of(block for request in others for block in request.history_blocks),
            has_others=bool(others),
        )


def _count_attended(request: StepRequest, most_attended: int | None) -> int:
    length = request.num_computed_tokens + request.num_tokens
    return request.num_tokens * (length if most_attended is None else min(length, most_attended))


class BlockTables:
    """The blocks of every request that has not finished, kept up to date by the scheduler's outputs."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[str, list[int]] = {}
        # Most decode steps read the same blocks as the one before: the last answer, and what it was an answer to.
        self._version = 0
        self._last_question: tuple[int, tuple[tuple[str, int], ...]] = (0, ())
        self._last_blocks = BlockRuns()

    def advance(self, update: ScheduleUpdate) -> Step:
        """Take over one output, and say what its step reads: the first blocks of each request, up to its history.

        Raises:
            KVPPOrderError: a request has more computed tokens than its blocks hold, or was never announced.
        """
        for request_id in update.finished:
            self._blocks.pop(request_id, None)
        for request in update.requests:
            self._take_blocks(request)
        requests = tuple(self._describe(request) for request in update.requests if request.num_tokens > 0)
        return Step(self._gather_blocks(update, requests), requests)

    def _describe(self, request: RequestUpdate) -> StepRequest:
        count = -(-request.num_computed_tokens // self._block_size)
        blocks = self._blocks[request.request_id]
        if count > len(blocks):
            raise KVPPOrderError(
                f"The history of request {request.request_id} takes {count} blocks of {self._block_size} tokens, but "
                f"the scheduler has named {len(blocks)}."
            )
        return StepRequest(request.num_tokens, request.num_computed_tokens, count, blocks)

    def _take_blocks(self, request: RequestUpdate) -> None:
        if request.replaces_blocks:
            self._blocks[request.request_id] = list(request.block_ids)
            self._version += 1
        elif request.request_id not in self._blocks:
            raise KVPPOrderError(f"Request {request.request_id} goes on, but KVPP has not seen it begin.")
        elif request.block_ids:
            # Blocks behind the history do not change what was read so far.
            self._blocks[request.request_id] += request.block_ids

    def _gather_blocks(self, update: ScheduleUpdate, requests: Sequence[StepRequest]) -> BlockRuns:
        names = (request.request_id for request in update.requests if request.num_tokens > 0)
        counts = (request.num_history_blocks for request in requests)
        question = (self._version, tuple(zip(names, counts, strict=True)))
        if question != self._last_question:
            blocks = {block for request in requests for block in request.history_blocks}
            self._last_question, self._last_blocks = question, BlockRuns.of(blocks)
        return self._last_blocks
