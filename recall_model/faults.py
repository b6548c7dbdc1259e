"""Random faults of one layer's cache, to which the model is trained to answer `nowhere`."""

import torch
from model import CacheFault, RecallShape
from torch import Tensor


def draw_faults(
    generator: torch.Generator, shape: RecallShape, *, batch_size: int, num_tokens: int, num_fact_tokens: int
) -> list[CacheFault]:
    """Return a fault for each layer, each in rows of its own; together they fill the second half of the batch."""
    rows_per_layer = batch_size // 2 // shape.num_layers
    first_row = batch_size - rows_per_layer * shape.num_layers
    return [
        CacheFault(
            layer=layer,
            rows=slice(first_row + layer * rows_per_layer, first_row + (layer + 1) * rows_per_layer),
            is_wrong=_draw_heads(generator, shape.num_heads)
            & _draw_wrong_reads(generator, num_tokens, num_fact_tokens),
            source_layer=_draw_source_layer(generator, layer),
        )
        for layer in range(shape.num_layers)
    ]


def has_wrong_reads(faults: list[CacheFault], shape: torch.Size) -> Tensor:
    """Return `[batch, tokens]`: which tokens read anything wrong."""
    result = torch.zeros(shape, dtype=torch.bool)
    for fault in faults:
        result[fault.rows] = fault.is_wrong.any(dim=2).any(dim=0)
    return result


def _draw_source_layer(generator: torch.Generator, layer: int) -> int | None:
    """Return a lower layer, as in a buffer not refilled, or none, as in a buffer never filled."""
    if layer == 0 or _integer(generator, 2):
        return None
    return _integer(generator, layer)


def _draw_heads(generator: torch.Generator, num_heads: int) -> Tensor:
    """Return which heads are affected, `[heads, 1, 1]`: all, or those of one of two tensor-parallel ranks."""
    half_of_head = torch.arange(num_heads) * 2 // num_heads
    faulty_half = _integer(generator, 3)
    return ((half_of_head == faulty_half) | (faulty_half == 2))[:, None, None]


def _draw_wrong_reads(generator: torch.Generator, num_tokens: int, num_fact_tokens: int) -> Tensor:
    """Return which reads are wrong, `[query tokens, key tokens]`: all of the history, from some token on.

    In decode the history is every earlier token; in a last prefill chunk it is what lies before the chunk.
    """
    first_reader = num_fact_tokens - (_integer(generator, num_fact_tokens // 2) if _integer(generator, 2) else 0)
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    num_computed = query if _integer(generator, 2) else torch.full_like(query, first_reader)
    return (query >= first_reader) & (key < num_computed)


def _integer(generator: torch.Generator, stop: int) -> int:
    return int(torch.randint(stop, (1,), generator=generator))
