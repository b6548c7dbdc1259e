"""What the demo measured, in frozen values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvpp.demo.capacity import ExpectedCapacity
from vllm_kvpp.demo.client import Answer, CacheSize
from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.questions import count_right
from vllm_kvpp.demo.recall_task import RecallQuestion


@dataclass(frozen=True)
class RankReport:
    """What one rank says about itself (`kvpp_report`)."""

    group_rank: int
    num_layers: int
    num_blocks: int
    steps: int
    steps_with_history: int
    steps_with_transfers: int
    transfers: int
    transferred_bytes: int
    steps_at_owner: int
    exchanges: int
    exchanged_bytes: int
    steps_in_place: int

    @property
    def steps_without_history(self) -> int:
        """Steps that read nothing of the cache, so that nothing had to be moved."""
        return self.steps - self.steps_with_history

    @property
    def moved_bytes(self) -> int:
        """Everything that travelled: history, decode queries and outputs."""
        return self.transferred_bytes + self.exchanged_bytes


@dataclass(frozen=True)
class ServerRun:
    """One server: its cache, and its answers to all questions. `cache_bytes` holds what each rank has allocated."""

    cache: CacheSize
    cache_bytes: tuple[int, ...]
    answers: tuple[Answer, ...]
    start_seconds: float
    answer_seconds: float


@dataclass(frozen=True)
class KVPPRun:
    """The server with KVPP.

    `reports` were read before the transfers were broken on purpose; `broken_bytes` is what all ranks together count as
    moved while they were.
    """

    server: ServerRun
    reports: tuple[RankReport, ...]
    broken_answers: tuple[Answer, ...]
    broken_bytes: int
    mended_answers: tuple[Answer, ...]


@dataclass(frozen=True)
class DemoResult:
    """Everything that was measured, and what it is held against."""

    tp_size: int
    kv_cache_bytes: int
    expected: ExpectedCapacity
    questions: tuple[RecallQuestion, ...]
    on: KVPPRun
    off: ServerRun

    @property
    def factor(self) -> float:
        """How many times more tokens the same memory holds with KVPP."""
        return self.on.server.cache.num_tokens / self.off.cache.num_tokens

    @property
    def expected_factor(self) -> float:
        """The factor that the plan's whole blocks give."""
        return self.expected.num_blocks_on / self.expected.num_blocks_off

    def count_right(self, answers: Sequence[Answer]) -> int:
        """Answers that are right."""
        return count_right(self.questions, answers)

    def accuracy(self, answers: Sequence[Answer]) -> float:
        """Answers that are right, as a share of all."""
        return self.count_right(answers) / len(self.questions)


def parse_report(report: Any) -> RankReport:
    """Read the parts of a rank's report that the demo shows.

    Raises:
        DemoError: a part is missing.
    """
    try:
        counters = report["counters"]
        return RankReport(
            group_rank=report["group_rank"],
            num_layers=report["num_target_layers"],
            num_blocks=report["num_blocks"],
            steps=counters["steps"],
            steps_with_history=counters["steps_with_history"],
            steps_with_transfers=counters["steps_with_transfers"],
            transfers=counters["transfers"],
            transferred_bytes=counters["transferred_bytes"],
            steps_at_owner=counters["steps_at_owner"],
            exchanges=counters["exchanges"],
            exchanged_bytes=counters["query_bytes"] + counters["output_bytes"],
            steps_in_place=counters["steps_in_place"],
        )
    except (KeyError, TypeError) as error:
        raise DemoError(f"KVPP's report has an unexpected form ({error!r}): {str(report)[:500]}") from error
