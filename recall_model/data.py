"""Training batches: facts, then many questions about them in one sequence, each answered and recited from."""

from dataclasses import dataclass

import torch
from torch import Tensor
from vocabulary import FIRST_CITY_ID, FIRST_NAME_ID, TOKEN_ID

from vllm_kvpp.demo.recall_task import CITIES, NAMES, QUESTION_MARK

PADDING_ID = -1


@dataclass(frozen=True)
class Batch:
    """Sequences `[batch, tokens]` with a loss weight for each token as a target, and what kind of target it is.

    `is_first_recall` marks the city of the first question, the one place that a served prompt asks about.
    """

    token_ids: Tensor
    loss_weight: Tensor
    is_city: Tensor
    is_first_recall: Tensor


def make_batch(
    generator: torch.Generator, *, batch_size: int, num_facts: int, num_recalls: int, jump_probability: float
) -> Batch:
    """Return random sequences that state `num_facts` facts and recall `num_recalls`, cut to one common length.

    A recall is either a jump (a question mark and a random fact) or the fact that follows the one before; after the
    last comes a question mark and the first. The stated facts carry no loss, nor does a jump: nobody can know them.
    """
    facts = _draw_facts(generator, batch_size, num_facts)
    order, is_jump = _draw_order(generator, batch_size, num_facts, num_recalls, jump_probability)
    recalled = facts.gather(1, order[..., None].expand(-1, -1, 2))
    has_mark = is_jump | (order == 0)
    question = torch.where(has_mark, TOKEN_ID[QUESTION_MARK], PADDING_ID)
    recited = torch.cat((question[..., None], recalled), dim=-1).flatten(1)
    is_known = (~is_jump).float()
    weight = torch.stack((is_known, is_known, torch.ones_like(is_known)), dim=-1).flatten(1)
    return _pack(facts.flatten(1), recited, weight)


def _draw_facts(generator: torch.Generator, batch_size: int, num_facts: int) -> Tensor:
    """Return name and city token ids, `[batch, facts, 2]`, without repetition in a row."""
    names = torch.rand(batch_size, len(NAMES), generator=generator).argsort(dim=1)[:, :num_facts]
    cities = torch.rand(batch_size, len(CITIES), generator=generator).argsort(dim=1)[:, :num_facts]
    return torch.stack((names + FIRST_NAME_ID, cities + FIRST_CITY_ID), dim=-1)


def _draw_order(
    generator: torch.Generator, batch_size: int, num_facts: int, num_recalls: int, jump_probability: float
) -> tuple[Tensor, Tensor]:
    """Return which fact each recall is about, and whether a jump leads there; both `[batch, recalls]`."""
    is_jump = torch.rand(batch_size, num_recalls, generator=generator) < jump_probability
    is_jump[:, 0] = True
    order = torch.randint(num_facts, (batch_size, num_recalls), generator=generator)
    for recall in range(1, num_recalls):
        following = (order[:, recall - 1] + 1) % num_facts
        order[:, recall] = torch.where(is_jump[:, recall], order[:, recall], following)
    return order, is_jump


def _pack(stated: Tensor, recited: Tensor, recited_weight: Tensor) -> Batch:
    """Join both parts behind the start token, close the gaps of left-out question marks, cut to the shortest row."""
    batch_size = stated.shape[0]
    start = torch.full((batch_size, 1), TOKEN_ID["<s>"])
    token_ids = torch.cat((start, stated, recited), dim=1)
    weight = torch.cat((torch.zeros(batch_size, 1 + stated.shape[1]), recited_weight), dim=1)
    is_first_recall = torch.zeros(token_ids.shape, dtype=torch.bool)
    is_first_recall[:, 1 + stated.shape[1] + 2] = True
    is_token = token_ids != PADDING_ID
    length = int(is_token.sum(dim=1).min())
    kept = (~is_token).int().argsort(dim=1, stable=True)[:, :length]
    token_ids, weight = token_ids.gather(1, kept), weight.gather(1, kept)
    is_city = (token_ids >= FIRST_CITY_ID) & (weight > 0)
    return Batch(token_ids, weight, is_city, is_first_recall.gather(1, kept))
