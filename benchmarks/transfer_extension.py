"""A method that the benchmarks call in the workers, through `worker_extension_cls` and `collective_rpc`."""


class TransferExtension:
    """Appended to the worker's bases by vLLM."""

    def set_transfer(self, mode: str) -> None:
        """Choose what the next steps transfer, "full", "active" or "auto"; called between steps, on all ranks alike.

        Raises:
            AttributeError: this KVPP has no such choice.
        """
        transfers = self._kvpp.transfers  # type: ignore[attr-defined]
        if not hasattr(transfers, "transfer"):
            raise AttributeError("LayerTransfers.transfer is gone; the benchmarks switch modes with it.")
        transfers.transfer = mode
