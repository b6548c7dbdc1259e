"""Data parallelism with experts on CPU: the collectives of ranks with different numbers of tokens."""

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def gather_rows(rows: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the rows of all ranks; rank i has `[sizes[i], …]`. Collective."""
    # gloo gathers equal shapes only.
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def sum_and_scatter_rows(rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum `[sum(sizes), …]` over all ranks, and return the `sizes[rank]` rows of this one. Collective."""
    total = rows.clone()
    dist.all_reduce(total, group=group)
    start = sum(sizes[:rank])
    return total[start : start + sizes[rank]]


def apply() -> None:
    """Give the CPU communicator the two collectives that its all-to-all manager calls."""
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    _check_dim(dim)
    if isinstance(input_, list):
        return [_all_gatherv(self, item, dim, sizes) for item in input_]
    return gather_rows(input_, sizes or [input_.shape[0]] * self.world_size, self.device_group)


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    _check_dim(dim)
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    return sum_and_scatter_rows(input_, sizes, self.rank_in_group, self.device_group)


def _check_dim(dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(
            f"data_parallel on CPU gathers and scatters rows (dim 0) only, and was asked for {dim}"
        )
