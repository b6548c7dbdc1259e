"""What the engine runs on the recall model have in common: their settings, the places of their actions, the marks."""

import itertools
from typing import Any

from engine_process import EngineRun
from tokenizers import Tokenizer

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR, RecallQuestion

KV_BYTES = 64 * 1024 * 1024
NUM_GENERATED = 24

RECALL_ENGINE = {
    "model": str(CHECKPOINT_DIR),
    "dtype": "float32",
    "max_model_len": 256,
    "kv_cache_memory_bytes": KV_BYTES,
    # Fewer than there are requests, so that prefills join batches that are decoding.
    "max_num_seqs": 4,
}


def kvpp(is_on: bool, **options: Any) -> dict[str, Any]:
    """The `additional_config` of a run."""
    return {"enable_kvpp": is_on, "kvpp": options} if options else {"enable_kvpp": is_on}


def kvpp_every_way(is_on: bool, **options: Any) -> dict[str, Any]:
    """The same for runs that change `kvpp.decode` between steps: with "owner" the ranks have what each way needs."""
    return kvpp(is_on, decode="owner", **options) if is_on else kvpp(is_on)


def rpc(method: str, *args: Any) -> dict[str, Any]:
    return {"kind": "rpc", "method": method, "args": list(args)}


REPORT = rpc("kvpp_report")


ON_WORKLOAD, ON_REPORT, ON_PREFILL_ONLY, ON_REPORT_AFTER_PREFILL, ON_AGAIN, ON_REPORT_AFTER_AGAIN, ON_WORKER = range(7)
ON_NOTHING_MOVED, ON_ONE_LAYER_NOT_MOVED, ON_RESTORED = 8, 10, 12
# Behind these, decode at the owner: reports, the workload, reports, and the same by the mode's default; then sabotaged.
ON_BEFORE_OWNER, ON_OWNER, ON_AFTER_OWNER = 14, 15, 16
ON_AUTO, ON_AFTER_AUTO, ON_ALL_LAYERS_HERE, ON_LAST_LAYER_HERE, ON_OWNER_RESTORED = 18, 19, 22, 24, 26
# And by reading in place.
ON_BEFORE_IN_PLACE, ON_IN_PLACE, ON_AFTER_IN_PLACE = 28, 29, 30
ON_ALL_LAYERS_READ_HERE, ON_LAST_LAYER_READ_HERE, ON_IN_PLACE_RESTORED = 32, 34, 36
OFF_WORKLOAD, OFF_PREFILL_ONLY, OFF_AGAIN, OFF_WORKER = range(4)


def counted(run: EngineRun, before: int, after: int, counter: str) -> list[float]:
    """What each rank counted between two reports."""
    reports = zip(run.actions[before], run.actions[after], strict=True)
    return [new["counters"][counter] - old["counters"][counter] for old, new in reports]


class Marking:
    """How many recited words are right."""

    def __init__(self, tokenizer: Tokenizer, questions: list[RecallQuestion]) -> None:
        self._tokenizer = tokenizer
        self._questions = questions

    def share_of_right_answers(self, run: EngineRun, action_index: int) -> float:
        """The share of questions whose first generated word is the city asked for."""
        first_words = [self._words(answer.token_ids)[:1] for answer in run.answers(action_index)]
        right = [words == [question.answer] for words, question in zip(first_words, self._questions, strict=True)]
        return sum(right) / len(right)

    def share_of_right_words(self, run: EngineRun, action_index: int) -> float:
        """The share of all generated words that the facts of their prompt demand."""
        pairs = [
            pair
            for answer, question in zip(run.answers(action_index), self._questions, strict=True)
            for pair in zip(
                self._words(answer.token_ids), question.continuation(len(answer.token_ids)).split(), strict=False
            )
        ]
        return sum(itertools.starmap(str.__eq__, pairs)) / len(pairs)

    def _words(self, token_ids: tuple[int, ...]) -> list[str]:
        return self._tokenizer.decode(list(token_ids)).split()
