"""Reading single fields of a configuration, with an error that names the field."""

from collections.abc import Mapping
from typing import Any

from vllm_kvpp.planner.errors import PlannerError

LARGEST_VALUE = 10**9


class Fields:
    """The values of one model's configuration, of which a null counts as absent."""

    def __init__(self, values: Mapping[str, Any], model: str) -> None:
        self._values = values
        self._model = model

    def get(self, name: str) -> Any:
        """The value as it stands, None if there is none."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether there is a value."""
        return self._values.get(name) is not None

    def names(self) -> tuple[str, ...]:
        """The fields that have a value."""
        return tuple(name for name in self._values if self.has(name))

    def number(self, *names: str, minimum: int = 1) -> int:
        """The whole number of the first of `names` that is there.

        Raises:
            PlannerError: there is none, or it is no number of at least `minimum`.
        """
        value = self.optional_number(*names, minimum=minimum)
        if value is None:
            raise PlannerError(
                f"The configuration of {self._model} has no {' or '.join(names)}, which the plan needs; "
                "add it, or name the model's full config.json."
            )
        return value

    def optional_number(self, *names: str, minimum: int = 0) -> int | None:
        """The whole number of the first of `names` that is there, None if none is.

        Raises:
            PlannerError: it is no number of at least `minimum`.
        """
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST_VALUE:
                raise PlannerError(
                    f"{name} is {str(value)[:40]!r} in the configuration of {self._model}; it has to be a whole "
                    f"number from {minimum} to {LARGEST_VALUE:,}."
                )
            return value
        return None
