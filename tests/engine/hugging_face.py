"""The Hugging Face model of a checkpoint, which shares no code with vLLM, to compare answers with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from engine_process import Answer
from transformers import AutoModelForCausalLM


def largest_logprob_error(model_folder: Path, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> float:
    """The largest difference between a logprob that vLLM reported and the Hugging Face model's, in float32.

    Every answer is fed back, so that one token chosen otherwise does not spoil those after it; and every token of an
    answer must be the most likely one, within that difference.
    """
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager").eval()
    errors = [_largest_error(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return max(errors)


@torch.no_grad()
def _largest_error(model: torch.nn.Module, prompt: list[int], answer: Answer) -> float:
    fed = torch.tensor([[*prompt, *answer.token_ids]])
    logprobs = model(fed).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    errors = []
    for position, chosen, reported in zip(logprobs, answer.token_ids, answer.logprobs, strict=True):
        errors.append(float(position.max() - position[chosen]))
        errors += [abs(float(position[int(token)]) - float.fromhex(value)) for token, value in reported.items()]
    return max(errors)
