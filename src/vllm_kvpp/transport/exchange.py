"""What an exchange is: it brings a layer's decode queries to the owner, and outputs and choices from there to all."""

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

from vllm_kvpp.selection import ExchangeTraits, QueryShape


class QueryExchange(Protocol):
    """Moves queries and outputs inside one group, one attention at a time.

    A rank's query comes as the tensors `[num_rows, heads_per_rank, width]` that, put side by side, are
    `[num_rows, heads_per_rank, query_width]`.
    """

    @property
    def traits(self) -> ExchangeTraits:
        """What attending at the owner costs, beside the bytes."""

    @property
    def max_rows(self) -> int:
        """Rows for which its memory is large enough, the same on every rank."""

    def prepare(self, num_rows: int) -> None:
        """Say how many rows the following attentions have, up to the next call.

        Raises:
            RuntimeError: a step that failed has left the ranks at different places.
        """

    def begin_gather(self) -> None:
        """Say, at an owner, that it will gather next: the other ranks' queries may arrive while it still computes.

        Raises:
            RuntimeError: a rank is gone.
        """

    def gather(self, owner_rank: int, query: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Bring every rank's query to the owner. Collective.

        Returns `[num_rows, num_heads, query_width]` at the owner, heads by rank, and None elsewhere; valid up to the
        next call.

        Raises:
            TimeoutError: a rank did not come within the limit.
            RuntimeError: a rank is gone, or comes with something else.
        """

    def scatter(self, owner_rank: int, output: torch.Tensor | None) -> torch.Tensor:
        """Bring each rank its heads' part of the owner's `output`, `[num_rows, num_heads, output_width]`. Collective.

        Returns `[num_rows, heads_per_rank, output_width]`; valid up to the next `gather`.

        Raises:
            TimeoutError: as of `gather`.
            RuntimeError: as of `gather`.
        """

    def share(self, owner_rank: int, choices: torch.Tensor) -> None:
        """Bring what the owner's indexer chose to every rank's `choices`, `[num_rows, num_choices]` int32. Collective.

        Raises:
            TimeoutError: as of `gather`.
            RuntimeError: as of `gather`.
        """


class ExchangeArea:
    """One rank's exchange memory, out of `[num_bytes]` uint8, cut for a number of rows.

    `own_query` and `own_output`, which share memory, are `[num_rows, heads_per_rank, width]`, `all_queries` is
    `[num_rows, num_heads, width]`, `choices` `[num_rows, num_choices]` int32. A third part is `queries_by_rank` and
    then `outputs_by_rank`, `[group_size, num_rows, heads_per_rank, width]`, or `all_outputs`, as `all_queries`.
    """

    def __init__(self, area: torch.Tensor, shape: QueryShape, dtype: torch.dtype) -> None:
        assert dtype.itemsize == shape.element_bytes, f"{dtype} has not {shape.element_bytes} bytes"
        self.max_rows = area.numel() // shape.exchange_row_bytes
        self._shape = shape
        start = self.max_rows * shape.choice_bytes
        self._choices = area[:start].view(torch.int32)
        # Queries and outputs take turns in the same memory: a query has been read when its output arrives.
        width = max(shape.query_width, shape.output_width)
        self._sections: list[torch.Tensor] = []
        for num_heads in (shape.heads_per_rank, shape.num_heads, shape.num_heads):
            num_bytes = self.max_rows * num_heads * width * shape.element_bytes
            self._sections.append(area[start : start + num_bytes].view(dtype))
            start += num_bytes
        self.cut(self.max_rows)

    def cut(self, num_rows: int) -> None:
        """Cut anew; what the area held is void."""
        assert num_rows <= self.max_rows, f"{num_rows} rows in memory for {self.max_rows}"
        shape = self._shape
        for_own = (num_rows, shape.heads_per_rank)
        by_rank = (shape.group_size, *for_own)
        query, output = shape.query_width, shape.output_width
        own, by_row, other = self._sections
        self.own_query = _view(own, *for_own, query)
        self.own_output = _view(own, *for_own, output)
        self.all_queries = _view(by_row, num_rows, shape.num_heads, query)
        self.queries_by_rank = _view(other, *by_rank, query)
        self.outputs_by_rank = _view(other, *by_rank, output)
        self.all_outputs = _view(other, num_rows, shape.num_heads, output)
        self.choices = _view(self._choices, num_rows, shape.num_choices)

    def heads_of(self, rank: int) -> slice:
        """The places of a rank's heads among all."""
        return slice(rank * self._shape.heads_per_rank, (rank + 1) * self._shape.heads_per_rank)


def write_query(query: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Put the parts of a query side by side into `target`."""
    width = sum(part.shape[-1] for part in query)
    # Into a tensor of another shape `cat` would write something else, with no more than a warning.
    assert (*query[0].shape[:-1], width) == target.shape, f"a query {width} wide for {tuple(target.shape)}"
    torch.cat(tuple(query), dim=-1, out=target)


def _view(section: torch.Tensor, *sizes: int) -> torch.Tensor:
    return section[: prod(sizes)].view(sizes)
