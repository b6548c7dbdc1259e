"""What a transport is: it brings bundles from their owners to the other ranks of one group, and knows no layers."""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_kvpp.selection import LinkTraits, Selection, TransferSeconds


@dataclass(frozen=True)
class BundleMemory:
    """A bundle's bytes on this rank: at the owner the persistent range, elsewhere the range in a scratch buffer.

    `whole` is `[num_bytes]` uint8; `components` holds one `[num_blocks, page_size_bytes]` uint8 view for each
    component, in the same order on every rank, together covering `whole`. `source` holds the owner's components, where
    this rank can read the owner's memory itself; empty at the owner, and where it cannot.
    """

    owner_rank: int
    whole: torch.Tensor
    components: tuple[torch.Tensor, ...]
    source: tuple[torch.Tensor, ...] = ()

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all components."""
        return sum(component.shape[1] for component in self.components)


class PendingTransfer(Protocol):
    """A transfer that has been started."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the transfer moves to each receiver."""

    @property
    def num_calls(self) -> int:
        """Calls of the backend, or copies, that it takes."""

    def wait(self) -> None:
        """Order the current stream after the transfer; without streams, block the host until it has finished.

        When what follows runs, the bundle's blocks have arrived, and the owner's bytes have been read: both may be
        written.

        Raises:
            TimeoutError: it did not finish within the transport's limit.
            RuntimeError: the backend reports a failure, such as a peer that is gone.
        """

    def seconds(self) -> TransferSeconds | None:
        """The times, once they are known; never blocks."""


class Transport(Protocol):
    """Moves bundles inside one group."""

    @property
    def traits(self) -> LinkTraits:
        """What calls and staging cost, from which the way is chosen."""

    def prepare(self, selection: Selection) -> None:
        """Say what the following transfers move, up to the next call.

        Collective, and never under way together with a transfer. From here on the peers may read this rank's bundles:
        the caller has queued everything that wrote them before.

        Raises:
            TimeoutError: as of `PendingTransfer.wait`.
            RuntimeError: as of `PendingTransfer.wait`.
        """

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """Start to bring the selected blocks of `memory` from its owner to every other rank.

        Collective: every rank of the group calls it for the same bundles in the same order. It never starts before
        the work already queued on the current stream is done, and does not block the host. The caller leaves the
        bundle's bytes alone until it has waited.
        """
