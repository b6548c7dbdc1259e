"""The attentions and indexers of a stage, which decode passes in one order."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvpp.errors import KVPPOrderError


@dataclass(frozen=True)
class OwnedPlace:
    """An attention or an indexer of the stage's target layers, by the name of its cache.

    `shares_choices` is for indexers: whether other ranks need what it chose.
    """

    name: str
    owner_rank: int
    shares_choices: bool = False


class PlaceWalk:
    """One forward's way past `places`, which are in the order of execution."""

    def __init__(self, places: Sequence[OwnedPlace]) -> None:
        self._places = tuple(places)
        self._owner_ranks = {place.name: place.owner_rank for place in self._places}
        self.num_passed = 0

    def find_owner(self, name: str) -> int:
        """The owner's group rank of the cache `name`."""
        return self._owner_ranks[name]

    def is_next(self, name: str) -> bool:
        """Whether it comes next."""
        return self.num_passed < len(self._places) and self._places[self.num_passed].name == name

    def check_next(self, name: str) -> None:
        """Check that it comes next.

        Raises:
            KVPPOrderError: it does not.
        """
        if not self.is_next(name):
            is_over = self.num_passed == len(self._places)
            expected = "no further layer" if is_over else self._places[self.num_passed].name
            raise KVPPOrderError(f"{name} was reached out of order in decode: KVPP expected {expected}.")

    def pass_next(self, name: str) -> OwnedPlace:
        """Go past the next place.

        Raises:
            KVPPOrderError: it is not `name`.
        """
        self.check_next(name)
        self.num_passed += 1
        return self._places[self.num_passed - 1]

    def check_all_passed(self) -> None:
        """Check at the end of a forward that no attention has read a cache that was not brought.

        Raises:
            KVPPOrderError: one has not come here.
        """
        if self.num_passed < len(self._places):
            raise KVPPOrderError(
                f"{self._places[self.num_passed].name} did not attend to its owner's memory in this step, so its "
                "results are wrong. A recorded graph or a fused operation passes KVPP's hook by; run with "
                "--enforce-eager."
            )

    def restart(self) -> None:
        """Begin again with the first place."""
        self.num_passed = 0
