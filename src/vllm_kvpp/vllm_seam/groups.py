"""The KVPP group: its ranks and its communicators, made beside vLLM's own groups and shared with none of them."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import ParallelConfig

from vllm_kvpp.errors import KVPPRankMismatchError
from vllm_kvpp.plan import split_into_groups
from vllm_kvpp.transport.base import BundleMemory, Transport
from vllm_kvpp.transport.broadcast import make_broadcast

_PROBE_BYTES = 64


@dataclass(frozen=True)
class KVPPGroup:
    """One group as one of its ranks sees it. `control` is a gloo group for the checks at start-up."""

    ranks: tuple[int, ...]
    rank: int
    transport: Transport
    control: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @property
    def label(self) -> str:
        """How messages call the group: its world ranks."""
        return f"of ranks {list(self.ranks)}"

    def check_agreement(self, what: str, value: str | int) -> None:
        """Compare `value` over the group. Collective.

        Raises:
            KVPPRankMismatchError: on every rank, if the ranks differ.
        """
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        if len(set(values)) > 1:
            listing = ", ".join(f"rank {rank}: {found}" for rank, found in zip(self.ranks, values, strict=True))
            raise KVPPRankMismatchError(f"The KVPP group {self.label} does not agree on {what}: {listing}.")


def make_group(parallel: ParallelConfig, device: torch.device, timeout_seconds: float) -> KVPPGroup:
    """Make every KVPP group of the world, and return this rank's. Collective over the whole world.

    The first transfer happens here, so that whatever the backend allocates is there before memory is profiled.
    """
    ranks_by_group = split_into_groups(
        dist.get_world_size(),
        data_parallel_size=parallel.data_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
    )
    # Making a group is a meeting of the whole world. Ranks may come to the first one minutes apart, which says nothing
    # about transfers: the control groups keep the backend's own limit, and come first.
    control_groups = [dist.new_group(list(ranks), backend="gloo") for ranks in ranks_by_group]
    timeout = timedelta(seconds=timeout_seconds)
    data_groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in ranks_by_group]
    world_rank = dist.get_rank()
    index = next(index for index, ranks in enumerate(ranks_by_group) if world_rank in ranks)
    ranks = ranks_by_group[index]
    transport = make_broadcast(data_groups[index], device, timeout_seconds)
    group = KVPPGroup(ranks, ranks.index(world_rank), transport, control_groups[index])
    _probe(group, device)
    return group


def _probe(group: KVPPGroup, device: torch.device) -> None:
    """Let every rank send a pattern of its own, and check that all arrive: a silent communicator means wrong KV."""
    for owner_rank in range(group.size):
        sent = torch.full((_PROBE_BYTES,), owner_rank + 1, dtype=torch.uint8, device=device)
        received = sent.clone() if owner_rank == group.rank else torch.zeros_like(sent)
        group.transport.start(BundleMemory(owner_rank, received, (received.view(1, -1),))).wait()
        if not torch.equal(received, sent):
            raise KVPPRankMismatchError(
                f"The KVPP group {group.label} does not deliver: a probe from rank {group.ranks[owner_rank]} did not "
                "arrive. Check the communication backend (NCCL, gloo, HCCL) and its settings."
            )
