"""A method that the benchmarks call in the workers, through `worker_extension_cls` and `collective_rpc`."""


class TransferExtension:
    """Appended to the worker's bases by vLLM."""

    def set_modes(self, transfer: str, decode: str) -> None:
        """Choose `kvpp.transfer` and `kvpp.decode` of the next steps; called between steps, on all ranks alike.

        Raises:
            AttributeError: this KVPP has no such choice.
        """
        transfers = self._kvpp.transfers  # type: ignore[attr-defined]
        if not hasattr(transfers, "transfer") or not hasattr(transfers.decode, "mode"):
            raise AttributeError(
                "LayerTransfers has no transfer, or no decode.mode; the benchmarks switch modes by them."
            )
        transfers.transfer, transfers.decode.mode = transfer, decode
