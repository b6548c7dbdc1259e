"""Measure how well a recall checkpoint answers held-out prompts, with Hugging Face transformers on CPU."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR, MAX_FACTS, MIN_FACTS, RecallQuestion, make_questions

REQUIRED_ACCURACY = 0.95
CONTINUATION_WORDS = 32
DEFAULT_FACTS = sorted({*range(MIN_FACTS, MAX_FACTS + 1, 4), MAX_FACTS})


@dataclass(frozen=True)
class Score:
    """Result on prompts with one number of facts in one precision.

    `margin` is the smallest difference, over right answers, between the log-probabilities of the answer and of the
    next best word; `continuation_accuracy` is the share of words of the right continuation that the model chooses
    when every word before it is right.
    """

    dtype: str
    num_facts: int
    num_questions: int
    accuracy: float
    margin: float
    continuation_accuracy: float


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[RecallQuestion], dtype: str
) -> Score:
    """Score `questions`, which must all have the same number of facts."""
    texts = [f"{question.prompt} {question.continuation(CONTINUATION_WORDS)}" for question in questions]
    token_ids = tokenizer(texts, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = model(token_ids[:, :-1]).logits[:, -CONTINUATION_WORDS:]
    logprobs = logits.float().log_softmax(dim=-1)
    expected = token_ids[:, -CONTINUATION_WORDS:]
    is_right = logprobs.argmax(dim=-1) == expected
    best = logprobs[:, 0].topk(2).values
    margin = (best[:, 0] - best[:, 1])[is_right[:, 0]]
    return Score(
        dtype=dtype,
        num_facts=len(questions[0].facts),
        num_questions=len(questions),
        accuracy=is_right[:, 0].float().mean().item(),
        margin=margin.min().item() if len(margin) else 0.0,
        continuation_accuracy=is_right.float().mean().item(),
    )


def show(scores: list[Score]) -> Table:
    """Lay the scores out for a terminal."""
    table = Table(title="Recall on held-out prompts")
    for column in ("precision", "facts", "questions", "answers right", "smallest margin", "continuation right"):
        table.add_column(column, justify="right")
    for row in scores:
        table.add_row(
            row.dtype,
            str(row.num_facts),
            str(row.num_questions),
            f"{row.accuracy:.2%}",
            f"{row.margin:.2f}",
            f"{row.continuation_accuracy:.2%}",
        )
    return table


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT_DIR,
    num_questions: Annotated[int, typer.Option(help="Questions for each number of facts.")] = 256,
    num_facts: Annotated[list[int] | None, typer.Option(help="Numbers of facts; may be repeated.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the held-out prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print the accuracy on held-out prompts; the exit status is 1 when any is below 95 %."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    scores = []
    for name in dtype or ["float32"]:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, name))
        scores += [
            score(model, tokenizer, make_questions(num_questions, facts, seed), name)
            for facts in num_facts or DEFAULT_FACTS
        ]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in scores], indent=2))
    else:
        Console().print(show(scores))
    if min(row.accuracy for row in scores) < REQUIRED_ACCURACY:
        raise typer.Exit(code=1)


if __name__ == "__main__":
    typer.run(main)
