"""The collectives of ranks with different numbers of rows, on three gloo ranks."""

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mla_cpu_reference.data_parallel import gather_rows, sum_and_scatter_rows

SIZES = [3, 0, 2]


def _rows_of(rank: int) -> torch.Tensor:
    return torch.arange(SIZES[rank] * 4).view(-1, 4) + 100 * rank


def _to_sum(rank: int) -> torch.Tensor:
    return torch.arange(sum(SIZES) * 4, dtype=torch.float32).view(-1, 4) * (rank + 1)


def _run_rank(rank: int, port: int, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(SIZES))
    summed = _to_sum(rank)
    scattered = sum_and_scatter_rows(summed, SIZES, rank, dist.group.WORLD)
    results[rank] = (
        gather_rows(_rows_of(rank), SIZES, dist.group.WORLD).tolist(),
        scattered.tolist(),
        torch.equal(summed, _to_sum(rank)),
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results() -> dict[int, Any]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with mp.get_context("spawn").Manager() as manager:
        shared = manager.dict()
        mp.spawn(_run_rank, args=(port, shared), nprocs=len(SIZES))
        return dict(shared)


def test_every_rank_gathers_the_rows_of_all_in_order(results: dict[int, Any]) -> None:
    expected = torch.cat([_rows_of(rank) for rank in range(len(SIZES))]).tolist()
    assert [results[rank][0] for rank in range(len(SIZES))] == [expected] * len(SIZES)


def test_every_rank_gets_its_own_rows_of_the_sum(results: dict[int, Any]) -> None:
    total = torch.stack([_to_sum(rank) for rank in range(len(SIZES))]).sum(0)
    assert [results[rank][1] for rank in range(len(SIZES))] == [part.tolist() for part in total.split(SIZES)]


def test_what_was_summed_stays_as_it_was(results: dict[int, Any]) -> None:
    assert all(results[rank][2] for rank in range(len(SIZES)))
