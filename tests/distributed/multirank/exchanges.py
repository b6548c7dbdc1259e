"""What is put round a product's exchange: prices, delays, and what loses something, which a test must notice."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_kvpp.selection import ExchangeTraits
from vllm_kvpp.transport.exchange import QueryExchange

ExchangeWrap = Callable[[QueryExchange, int], QueryExchange]
"""Puts something round the exchange of one group rank."""


@dataclass
class ExchangeWrapper:
    """An exchange that hands everything on to another one."""

    inner: QueryExchange

    @property
    def traits(self) -> ExchangeTraits:
        """See `QueryExchange.traits`."""
        return self.inner.traits

    @property
    def max_rows(self) -> int:
        """See `QueryExchange.max_rows`."""
        return self.inner.max_rows

    def prepare(self, num_rows: int) -> None:
        """See `QueryExchange.prepare`."""
        self.inner.prepare(num_rows)

    def begin_gather(self) -> None:
        """See `QueryExchange.begin_gather`."""
        self.inner.begin_gather()

    def gather(self, owner_rank: int, query: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See `QueryExchange.gather`."""
        return self.inner.gather(owner_rank, query)

    def scatter(self, owner_rank: int, output: torch.Tensor | None) -> torch.Tensor:
        """See `QueryExchange.scatter`."""
        return self.inner.scatter(owner_rank, output)

    def share(self, owner_rank: int, choices: torch.Tensor) -> None:
        """See `QueryExchange.share`."""
        self.inner.share(owner_rank, choices)


@dataclass
class PricedExchange(ExchangeWrapper):
    """Has a price at which some steps are cheaper at the owner and some are not."""

    price: ExchangeTraits

    @property
    def traits(self) -> ExchangeTraits:
        """See `QueryExchange.traits`."""
        return self.price


@dataclass
class UnevenExchange(ExchangeWrapper):
    """Comes a little late to each call, on each rank by another time."""

    generator: random.Random

    def gather(self, owner_rank: int, query: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See `QueryExchange.gather`."""
        self._pause()
        return self.inner.gather(owner_rank, query)

    def scatter(self, owner_rank: int, output: torch.Tensor | None) -> torch.Tensor:
        """See `QueryExchange.scatter`."""
        self._pause()
        return self.inner.scatter(owner_rank, output)

    def share(self, owner_rank: int, choices: torch.Tensor) -> None:
        """See `QueryExchange.share`."""
        self._pause()
        self.inner.share(owner_rank, choices)

    def _pause(self) -> None:
        time.sleep(self.generator.choice((0, 0, 0, 0.003)))


class SwappingExchange(ExchangeWrapper):
    """Broken: an owner gives each rank the output of another rank's heads."""

    def scatter(self, owner_rank: int, output: torch.Tensor | None) -> torch.Tensor:
        """See `QueryExchange.scatter`."""
        return self.inner.scatter(owner_rank, output if output is None else output.roll(1, dims=1))


class ForgetfulExchange(ExchangeWrapper):
    """Broken: what an indexer chose reaches nobody but its owner."""

    def share(self, owner_rank: int, choices: torch.Tensor) -> None:
        """See `QueryExchange.share`."""
        self.inner.share(owner_rank, choices.clone())


@dataclass
class LostExchange(ExchangeWrapper):
    """Does something else at one gather or scatter, counted from 0 since the start."""

    call: str
    number: int
    instead: Callable[[], None]
    num_calls: dict[str, int] = field(default_factory=lambda: {"gather": 0, "scatter": 0})

    def gather(self, owner_rank: int, query: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See `QueryExchange.gather`."""
        self._count("gather")
        return self.inner.gather(owner_rank, query)

    def scatter(self, owner_rank: int, output: torch.Tensor | None) -> torch.Tensor:
        """See `QueryExchange.scatter`."""
        self._count("scatter")
        return self.inner.scatter(owner_rank, output)

    def _count(self, call: str) -> None:
        if (call, self.num_calls[call]) == (self.call, self.number):
            self.instead()
        self.num_calls[call] += 1


def uneven_exchange(exchange: QueryExchange, group_rank: int) -> QueryExchange:
    """Ranks take turns in being ahead."""
    return UnevenExchange(exchange, random.Random(group_rank))


def swap_heads(exchange: QueryExchange, group_rank: int) -> QueryExchange:
    """Outputs come to the wrong ranks."""
    return SwappingExchange(exchange)


def forget_choices(exchange: QueryExchange, group_rank: int) -> QueryExchange:
    """Choices come to nobody."""
    return ForgetfulExchange(exchange)
