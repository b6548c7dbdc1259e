"""Check that the answers of a recall checkpoint depend on the cache of every single layer.

The facts are computed first, as a cached prefix. Then one layer's cache is replaced, and the name asked for is decoded.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR, make_questions

HIGHEST_ACCURACY_WITH_FAULT = 0.05


def accuracy_with_fault(
    model: PreTrainedModel, token_ids: Tensor, answers: Tensor, layer: int | None, source_layer: int | None
) -> float:
    """Return the share of right answers when `layer` finds the cache of `source_layer`, or zeros without a source."""
    with torch.inference_mode():
        cache = model(
            token_ids[:, :-1], use_cache=True, past_key_values=DynamicCache(config=model.config)
        ).past_key_values
        if layer is not None:
            _replace(cache, layer, source_layer)
        logits = model(token_ids[:, -1:], past_key_values=cache).logits
    return float((logits[:, -1].argmax(dim=-1) == answers).float().mean())


def _replace(cache: Any, layer: int, source_layer: int | None) -> None:
    target = cache.layers[layer]
    if source_layer is None:
        target.keys, target.values = torch.zeros_like(target.keys), torch.zeros_like(target.values)
    else:
        source = cache.layers[source_layer]
        target.keys, target.values = source.keys.clone(), source.values.clone()


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT_DIR,
    num_questions: Annotated[int, typer.Option(help="Held-out questions.")] = 128,
    num_facts: Annotated[int, typer.Option(help="Facts in each prompt.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the held-out prompts.")] = 0,
) -> None:
    """Print the accuracy with each layer's cache lost; the exit status is 1 when a loss goes unnoticed."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    questions = make_questions(num_questions, num_facts, seed)
    token_ids = tokenizer([question.prompt for question in questions], return_tensors="pt").input_ids
    answers = torch.tensor([tokenizer.convert_tokens_to_ids(question.answer) for question in questions])
    table = Table(title=f"Right answers with one layer's cache replaced ({num_questions} questions, {num_facts} facts)")
    for column in ("layer", "by zeros", "by the layer before"):
        table.add_column(column, justify="right")
    table.add_row("none", f"{accuracy_with_fault(model, token_ids, answers, None, None):.1%}", "")
    worst = 0.0
    num_layers = model.config.num_hidden_layers
    for layer in range(num_layers):
        sources = (None, (layer - 1) % num_layers)
        found = [accuracy_with_fault(model, token_ids, answers, layer, source) for source in sources]
        worst = max(worst, *found)
        table.add_row(str(layer), *(f"{accuracy:.1%}" for accuracy in found))
    Console().print(table)
    if worst > HIGHEST_ACCURACY_WITH_FAULT:
        raise typer.Exit(code=1)


if __name__ == "__main__":
    typer.run(main)
