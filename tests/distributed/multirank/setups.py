"""How the ranks of a scenario move their blocks, or attend to the owner: modes, transports, what is put round them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from multirank.exchanges import uneven_exchange
from multirank.toy_decode import DecodeSetup
from multirank.toy_group import DeafSignals, Group, MakeSignals, SlowSignals
from multirank.transports import RestlessTransport, StagingTransport, StrictTransport, UnevenTransport
from vllm_kvpp.selection import TransferMode
from vllm_kvpp.transport.base import Transport
from vllm_kvpp.transport.signals import Signals

Wrap = Callable[[Transport, int], Transport]
"""Puts something round the transport of one group rank."""


@dataclass(frozen=True)
class TransferSetup:
    """One way to run transfers; `wraps` go round the transport from the inside out.

    Staging memory holds `num_staged_blocks` blocks of the largest bundle, whole or not. `decode` is None where all
    requests attend on every rank.
    """

    transfer: TransferMode
    num_staged_blocks: float = 0
    shares_memory: bool = False
    make_signals: MakeSignals = Signals
    wraps: tuple[Wrap, ...] = ()
    decode: DecodeSetup | None = None

    @property
    def reads_in_place(self) -> bool:
        """Whether decode rows may read the owner's memory in place."""
        return self.decode is not None and self.decode.can_read_in_place

    def with_decode(self, decode: DecodeSetup) -> Self:
        """The same with decode rows that may attend at the owner, or in its memory."""
        return replace(self, decode=decode)

    def wrapped(self, *wraps: Wrap) -> Self:
        """The same with more round the transport."""
        return replace(self, wraps=self.wraps + wraps)

    def staging_bytes(self, largest_page_bytes: int) -> int:
        """The size of the staging memory."""
        return int(self.num_staged_blocks * largest_page_bytes)

    def make_transport(self, group: Group, staging: torch.Tensor | None, largest_page_bytes: int) -> Transport:
        """The transport of one rank. Collective if memory is shared."""
        transport = (
            group.make_peer_copies() if self.shares_memory else group.make_broadcast(staging, largest_page_bytes)
        )
        for wrap in self.wraps:
            transport = wrap(transport, group.rank)
        return transport


def strict(transport: Transport, group_rank: int) -> Transport:
    """Every freedom that the contract gives a transport is used to the utmost."""
    return StrictTransport(transport, group_rank)


def uneven(transport: Transport, group_rank: int) -> Transport:
    """Ranks take turns in being ahead."""
    return UnevenTransport(transport, random.Random(group_rank))


def restless(transport: Transport, group_rank: int) -> Transport:
    """Every freedom that the contract gives an owner is used to the utmost."""
    return RestlessTransport(transport, group_rank)


def prefer_staging(transport: Transport, group_rank: int) -> Transport:
    """Blocks are staged wherever they can be."""
    return StagingTransport(transport)


FULL = TransferSetup("full")
RUNS = TransferSetup("active")
STAGED = TransferSetup("active", num_staged_blocks=2.5, wraps=(prefer_staging,))
AUTO = TransferSetup("auto", num_staged_blocks=3)
PEERS = TransferSetup("active", shares_memory=True)
PEERS_FULL = TransferSetup("full", shares_memory=True)
PEERS_AUTO = TransferSetup("auto", shares_memory=True)
# Receivers come late to an owner that writes early.
PEERS_UNEVEN = replace(PEERS.wrapped(restless, uneven), make_signals=SlowSignals)
PEERS_DEAF = replace(PEERS_UNEVEN, make_signals=DeafSignals)

SETUPS = {
    "full": FULL,
    "full_strict": FULL.wrapped(strict),
    "runs": RUNS,
    "runs_strict": RUNS.wrapped(strict),
    "staged": STAGED,
    "staged_strict": STAGED.wrapped(strict),
    "auto_strict": AUTO.wrapped(strict),
    "peers": PEERS,
    "peers_strict": PEERS.wrapped(strict),
    "peers_uneven": PEERS_UNEVEN,
    "peers_full_strict": PEERS_FULL.wrapped(strict),
    "peers_auto_strict": PEERS_AUTO.wrapped(strict),
}
"""Every setup that has to compute what the reference computes."""

AT_OWNER = DecodeSetup("owner")
WHAT_IS_CHEAPER = DecodeSetup("auto")
# As with drafts: a request that decodes has up to three tokens.
SEVERAL_TOKENS = DecodeSetup("owner", most_tokens=3, num_rows=8)
IN_PLACE = DecodeSetup("in_place", can_read_in_place=True)

DECODE_SETUPS = {
    "peers_owner": PEERS.wrapped(strict).with_decode(AT_OWNER),
    "peers_auto": PEERS.wrapped(strict).with_decode(WHAT_IS_CHEAPER),
    "peers_uneven": PEERS_UNEVEN.with_decode(SEVERAL_TOKENS.wrapped(uneven_exchange)),
    "gloo_owner": STAGED.wrapped(strict).with_decode(AT_OWNER),
    "gloo_auto": RUNS.wrapped(strict).with_decode(WHAT_IS_CHEAPER),
    "gloo_uneven": AUTO.wrapped(strict, uneven).with_decode(SEVERAL_TOKENS.wrapped(uneven_exchange)),
    "peers_in_place": PEERS.wrapped(strict).with_decode(IN_PLACE),
    "peers_in_place_uneven": PEERS_UNEVEN.with_decode(replace(IN_PLACE, most_tokens=3)),
}
"""Those in which decode rows may attend at the owner, or in its memory."""
