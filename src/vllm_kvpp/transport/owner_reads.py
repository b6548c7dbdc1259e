"""Peers read an owner's memory in place; messages say when it is written, and when all have read.

```text
owner    write layer n ── tell ─┬─ read ─┐
peer                            └─ read ─┴─ … ── end of the step: tell all ── next step: hear from all ── write
```
"""

from vllm_kvpp.transport.signals import Signals, UnexpectedMessageError, make_message


class OwnerReads:
    """The messages of one rank; the owner's memory is read as if it were the rank's own."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._subject = ""
        self._step = 0
        # What everybody says at the end of the last step that read in place, as long as it is waited for.
        self._awaited: bytes | None = None

    def prepare(self, num_rows: int) -> None:
        """Say how many decode rows the step that begins has: a rank that has other ones does not read the same."""
        self._subject = f"in place {self._step} {num_rows}"

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
            if error.received == self._make_farewell():
                raise RuntimeError(f"group rank {error.peer} has given up this step") from error
            raise

    def tell_read(self) -> None:
        """Tell every peer that this rank reads nothing more of this step.

        Raises:
            RuntimeError: a peer is gone.
        """
        self._awaited = self._make_farewell()
        self._tell_all(self._awaited)

    def begin_step(self) -> None:
        """Wait until every peer has read what it wanted of the last step that read in place, if there was one.

        Called before every step, on every rank alike: the messages of different steps differ.

        Raises:
            TimeoutError: as of `await_written`.
            RuntimeError: as of `await_written`.
        """
        self._step += 1
        if self._awaited is not None:
            self._signals.expect(self._awaited)
            self._awaited = None

    def _make_farewell(self) -> bytes:
        return make_message("have read", self._step)

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
