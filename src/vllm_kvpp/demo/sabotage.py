"""Runs inside vLLM's workers (`--worker-extension-cls`): breaks KVPP's transfers on purpose, and mends them.

A right answer proves something only if it would have been wrong without the transfers. This takes them away.
"""

from typing import TYPE_CHECKING, Any

from vllm_kvpp.demo.cache_meter import CacheMeterExtension
from vllm_kvpp.selection import LinkTraits, Selection, TransferSeconds

if TYPE_CHECKING:
    from vllm_kvpp.transport.base import BundleMemory


class NoTransfer:
    """A transfer that has nothing to wait for."""

    num_bytes = 0
    num_calls = 0

    def wait(self) -> None:
        """Return at once."""

    def seconds(self) -> TransferSeconds:
        """No time."""
        return TransferSeconds(total=0.0, waited=0.0)


class NoTransport:
    """A `Transport` that moves nothing: receivers read whatever their scratch buffer holds."""

    traits = LinkTraits(call_bytes=0)

    def prepare(self, selection: Selection) -> None:
        """See `Transport.prepare`."""

    def start(self, memory: "BundleMemory") -> NoTransfer:  # noqa: ARG002
        """See `Transport.start`."""
        return NoTransfer()


class SabotageExtension(CacheMeterExtension):
    """Mixed into KVPP's worker by vLLM; call its methods while no request runs, so that all ranks change together."""

    # What the worker that it is mixed into provides.
    _kvpp: Any

    def demo_break_transfers(self) -> dict[str, str]:
        """Move nothing from here on."""
        transfers = self._kvpp.transfers
        if not isinstance(transfers.transport, NoTransport):
            self._demo_transport, self._demo_decode = transfers.transport, transfers.decode
            # Decode that goes to the owner's memory would still be right; so its history has to be moved, and is not.
            transfers.transport, transfers.decode = NoTransport(), None
        return {"transport": type(transfers.transport).__name__}

    def demo_mend_transfers(self) -> dict[str, str]:
        """Take the real transport back."""
        transfers = self._kvpp.transfers
        if isinstance(transfers.transport, NoTransport):
            transfers.transport, transfers.decode = self._demo_transport, self._demo_decode
        return {"transport": type(transfers.transport).__name__}
