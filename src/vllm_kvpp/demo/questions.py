"""The demo's questions, in batches, and when an answer is right."""

from collections.abc import Sequence

from vllm_kvpp.demo.client import Answer
from vllm_kvpp.demo.recall_task import RecallQuestion, make_questions

# Two batches, with prompts of another length each, so that the second one meets used blocks.
FACTS_BY_BATCH = (12, 20)
SEED = 2026
# The city that was asked for, and what the prompt says after it. The first word comes out of the prompt's own pass, the
# others out of the cache.
NUM_WORDS = 9


def make_batches(num_questions: int) -> tuple[tuple[RecallQuestion, ...], ...]:
    """Make the questions: the same ones for the same number. A batch is asked at once, batches one after another."""
    first = -(-num_questions // 2)
    sizes = (first, num_questions - first)
    return tuple(
        tuple(make_questions(size, num_facts, SEED)) for size, num_facts in zip(sizes, FACTS_BY_BATCH, strict=True)
    )


def is_right(question: RecallQuestion, answer: Answer) -> bool:
    """Whether every word of the answer is the right one."""
    return answer.text.split() == question.continuation(NUM_WORDS).split()


def count_right(questions: Sequence[RecallQuestion], answers: Sequence[Answer]) -> int:
    """Answers that are right."""
    return sum(is_right(question, answer) for question, answer in zip(questions, answers, strict=True))
