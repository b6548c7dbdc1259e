"""Peers read an owner's memory in place; messages say when it is written, and when all have read.

```text
owner    write layer n ── tell ─┬─ read ─┐
peer                            └─ read ─┴─ … ── end of the step: tell all ── next step: hear from all ── write
```
"""

from vllm_kvpp.transport.signals import Signals, UnexpectedMessageError, make_message

_HAVE_READ = make_message("have read", 0)


class OwnerReads:
    """The messages of one rank; the owner's memory is read as if it were the rank's own."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._subject = ""
        self._is_awaited = False

    def prepare(self, num_rows: int) -> None:
        """Say how many decode rows the step that begins has: a rank that has other ones does not read the same."""
        self._subject = f"in place {num_rows}"

    def tell_written(self, number: int) -> None:
        """Tell every peer that what it reads next, the step's place `number`, is written.

        Raises:
            RuntimeError: a peer is gone.
        """
        self._tell_all(make_message(self._subject, number))

    def await_written(self, owner_rank: int, number: int) -> None:
        """Wait until the owner of the step's place `number` has written it.

        Raises:
            TimeoutError: it did not come within the limit.
            RuntimeError: it is gone, has given up the step, or comes with something else.
        """
        try:
            self._signals.expect(make_message(self._subject, number), peers=(owner_rank,))
        except UnexpectedMessageError as error:
            if error.received == _HAVE_READ:
                raise RuntimeError(f"group rank {error.peer} has given up this step") from error
            raise

    def tell_read(self) -> None:
        """Tell every peer that this rank reads nothing more of this step.

        Raises:
            RuntimeError: a peer is gone.
        """
        self._is_awaited = True
        self._tell_all(_HAVE_READ)

    def await_read(self) -> None:
        """Wait until every peer has read what it wanted of the last step that read in place, if there was one.

        Raises:
            TimeoutError: as of `await_written`.
            RuntimeError: as of `await_written`.
        """
        if self._is_awaited:
            self._is_awaited = False
            self._signals.expect(_HAVE_READ)

    def _tell_all(self, message: bytes) -> None:
        """Tell everybody who is there, also behind one who is not: these would wait for nothing."""
        failures: list[RuntimeError] = []
        for peer in self._signals.peers:
            try:
                self._signals.send(peer, message)
            except RuntimeError as error:
                failures.append(error)
        if failures:
            raise failures[0]
