"""What a transport is: it brings one bundle from its owner to the other ranks of one group, and knows no layers."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class BundleMemory:
    """A bundle's bytes on this rank: at the owner the persistent range, elsewhere the range in a scratch buffer.

    `whole` is `[num_bytes]` uint8; `components` holds one `[num_blocks, page_size_bytes]` uint8 view for each
    component, in the same order on every rank, together covering `whole`.
    """

    owner_rank: int
    whole: torch.Tensor
    components: tuple[torch.Tensor, ...]


class PendingTransfer(Protocol):
    """A transfer that has been started."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the transfer moves."""

    def wait(self) -> None:
        """Order the current stream after the transfer; without streams, block the host until it has finished.

        When what follows runs, the bundle has arrived, and the owner's bytes have been read: both may be written.

        Raises:
            TimeoutError: it did not finish within the transport's limit.
            RuntimeError: the backend reports a failure, such as a peer that is gone.
        """


class Transport(Protocol):
    """Moves bundles inside one group."""

    def start(self, memory: BundleMemory) -> PendingTransfer:
        """Start to bring `memory` from its owner to every other rank.

        Collective: every rank of the group calls it for the same bundles in the same order. It never starts before
        the work already queued on the current stream is done, and does not block the host. The caller leaves the
        bundle's bytes alone until it has waited.
        """
