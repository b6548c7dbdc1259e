"""Train the recall model from nothing and write it as a checkpoint folder.

The first stage teaches recall: few facts at first, more whenever the model masters them. The second stage makes every
layer matter: half of each batch reads a faulty cache in one layer and must then answer `nowhere`.
"""

import json
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import typer
from data import Batch, make_batch
from export import round_weights, save_checkpoint
from faults import draw_faults, has_wrong_reads
from marks import impose_marks, initialise_latent_norms
from model import RecallModel, RecallShape, initialise
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from vocabulary import TOKEN_ID, WORDS

from vllm_kvpp.demo.recall_task import MAX_FACTS, NOWHERE, TRAINING_SEEDS

FIRST_NUM_FACTS = 3
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 150
MASTERED = 0.93
STEPS_TO_MASTER = 20
REPORT_EVERY = 25


@dataclass(frozen=True)
class Outcome:
    """Loss of one step, shares of right cities and right next words with a sound cache, and of noticed faults."""

    loss: Tensor
    city_accuracy: float
    word_accuracy: float
    fault_accuracy: float


class Trainer:
    """Model, optimiser and random numbers of one run."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(TRAINING_SEEDS[seed])
        self.model = RecallModel(RecallShape(vocab_size=len(WORDS)))
        initialise(self.model)
        initialise_latent_norms(self.model)
        impose_marks(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05
        )
        self.num_steps = 0
        self.console = Console()
        self.started = time.monotonic()

    def learn_recall(self, max_steps: int) -> None:
        """Raise the number of facts whenever the model masters it; stop when it masters `MAX_FACTS`."""
        num_facts, recent = FIRST_NUM_FACTS, deque[float](maxlen=STEPS_TO_MASTER)
        for step in range(max_steps):
            drawn = num_facts if self._integer(4) else FIRST_NUM_FACTS + self._integer(num_facts - FIRST_NUM_FACTS + 1)
            batch = self._draw_batch(drawn, batch_size=64, num_recalls=14)
            outcome = self._step(batch, drawn, LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS), with_faults=False)
            recent.append(min(outcome.city_accuracy, outcome.word_accuracy))
            self._report("recall", num_facts, outcome)
            if len(recent) == STEPS_TO_MASTER and fmean(recent) > MASTERED:
                if num_facts == MAX_FACTS:
                    return
                num_facts = min(num_facts + 1 if num_facts < 6 else 2 * num_facts, MAX_FACTS)
                recent.clear()
        raise typer.BadParameter(f"no recall of {num_facts} facts after {max_steps} steps; try another seed")

    def make_every_layer_matter(self, num_steps: int) -> None:
        """Train on sound and faulty caches together, with a learning rate that falls to nothing."""
        for step in range(num_steps):
            # Few facts more often than many: short sequences cost less, and a fault is as hard to notice in them.
            num_facts = FIRST_NUM_FACTS + self._integer(1 + self._integer(MAX_FACTS - FIRST_NUM_FACTS + 1))
            batch = self._draw_batch(num_facts, batch_size=64 if num_facts < 16 else 32, num_recalls=10)
            rate = LEARNING_RATE * min(1.0, (step + 1) / 50, 2.0 * (1.0 - step / num_steps))
            self._report("faults", num_facts, self._step(batch, num_facts, rate, with_faults=True))

    def _draw_batch(self, num_facts: int, *, batch_size: int, num_recalls: int) -> Batch:
        return make_batch(
            self.generator,
            batch_size=batch_size,
            num_facts=num_facts,
            num_recalls=num_recalls,
            jump_probability=0.5,
        )

    def _step(self, batch: Batch, num_facts: int, learning_rate: float, *, with_faults: bool) -> Outcome:
        token_ids, targets = batch.token_ids[:, :-1], batch.token_ids[:, 1:]
        faults = []
        if with_faults:
            faults = draw_faults(
                self.generator,
                self.model.shape,
                batch_size=len(token_ids),
                num_tokens=token_ids.shape[1],
                num_fact_tokens=1 + 2 * num_facts,
            )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(token_ids, faults)
        is_faulty = has_wrong_reads(faults, token_ids.shape)
        expected = targets.masked_fill(is_faulty, TOKEN_ID[NOWHERE])
        weight, is_city = batch.loss_weight[:, 1:], batch.is_city[:, 1:]
        loss = recall_loss(logits.float(), expected, weight)
        self._update(loss, learning_rate)
        is_right, is_sound = (logits.argmax(dim=-1) == expected).float(), (weight > 0) & ~is_faulty
        return Outcome(
            loss=loss.detach(),
            city_accuracy=is_right[is_city & is_sound].mean().item(),
            word_accuracy=is_right[~is_city & is_sound].mean().item(),
            fault_accuracy=is_right[(weight > 0) & is_faulty].mean().item(),
        )

    def _update(self, loss: Tensor, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        impose_marks(self.model)
        self.num_steps += 1

    def _report(self, stage: str, num_facts: int, outcome: Outcome) -> None:
        if self.num_steps % REPORT_EVERY == 0:
            seconds = time.monotonic() - self.started
            self.console.print(
                f"step {self.num_steps:4}  {seconds:4.0f} s  {stage}  {num_facts:2} facts",
                f"loss {outcome.loss.item():.3f}",
                f"cities {outcome.city_accuracy:.1%}  words {outcome.word_accuracy:.1%}",
                f"faults noticed {outcome.fault_accuracy:.1%}" if stage == "faults" else "",
            )

    def _integer(self, stop: int) -> int:
        return int(torch.randint(stop, (1,), generator=self.generator))


def recall_loss(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy; `logits` `[batch, tokens, vocab_size]`, the others `[batch, tokens]`."""
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.view_as(weight) * weight).sum() / weight.sum()


def answer_accuracy(model: RecallModel, num_facts: int, seed: int) -> float:
    """Return the share of right answers to the first question of fresh training sequences."""
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(generator, batch_size=256, num_facts=num_facts, num_recalls=1, jump_probability=1.0)
    with torch.inference_mode():
        is_right = model(batch.token_ids[:, :-1]).argmax(dim=-1) == batch.token_ids[:, 1:]
    return float(is_right[batch.is_city[:, 1:]].float().mean())


def main(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint; made when missing.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data, from 0.")] = 0,
    max_recall_steps: Annotated[int, typer.Option(help="Give up when recall takes longer.")] = 1500,
    fault_steps: Annotated[int, typer.Option(help="Steps of the second stage.")] = 200,
    num_threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
) -> None:
    """Train, write the checkpoint, and put steps, seconds and accuracy into `training.json`."""
    torch.set_num_threads(num_threads)
    trainer = Trainer(seed)
    trainer.learn_recall(max_recall_steps)
    recall_steps = trainer.num_steps
    trainer.make_every_layer_matter(fault_steps)
    out.mkdir(parents=True, exist_ok=True)
    round_weights(trainer.model)
    save_checkpoint(trainer.model, out)
    report = {
        "seed": seed,
        "recall_steps": recall_steps,
        "fault_steps": fault_steps,
        "seconds": round(time.monotonic() - trainer.started),
        "threads": num_threads,
        "accuracy": {n: answer_accuracy(trainer.model, n, TRAINING_SEEDS[-1]) for n in (4, 8, 16, 24, MAX_FACTS)},
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    trainer.console.print(report)


if __name__ == "__main__":
    typer.run(main)
