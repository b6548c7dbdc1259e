"""One rank's process: joins the world, then runs the calls it is sent until its owner is done or gone."""

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """What every rank has to know to join; `groups` are made beside the default group, by world ranks."""

    size: int
    directory: Path
    groups: tuple[tuple[int, ...], ...]
    timeout_seconds: float

    def stack_file(self, world_rank: int) -> Path:
        """Where a rank writes its stacks when it is asked what it is doing."""
        return self.directory / f"stacks-{world_rank}.txt"


@dataclass(frozen=True)
class Call:
    """`function(rank, *args)`; the function has to be importable, so it stands in this package."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a call: a value, a traceback, or neither when the process ended."""

    world_rank: int
    value: Any = None
    traceback: str | None = None
    exit_code: int | None = None

    @property
    def is_failure(self) -> bool:
        """Whether the rank raised or ended."""
        return self.traceback is not None or self.exit_code is not None

    def __str__(self) -> str:
        return f"rank {self.world_rank}: {self.traceback or f'ended with exit code {self.exit_code}'}"


@dataclass(frozen=True)
class Rank:
    """This process's place in the world, with the groups it is in, each twice: for transfers and for queries."""

    world_rank: int
    timeout_seconds: float
    groups: dict[tuple[int, ...], dist.ProcessGroup]
    query_groups: dict[tuple[int, ...], dist.ProcessGroup]


def serve(world: World, world_rank: int, connection: Connection) -> None:
    """Run calls until None comes or the owner's end of the connection is closed."""
    with world.stack_file(world_rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        rank = _join(world, world_rank)
        try:
            while (call := connection.recv()) is not None:
                connection.send(_perform(call, rank))
        except (EOFError, BrokenPipeError):
            pass
    # Not sys.exit: torch would tear down groups whose other ranks may be gone, and wait for them.
    os._exit(0)


def _join(world: World, world_rank: int) -> Rank:
    torch.set_num_threads(1)
    if os.uname().sysname == "Linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(world.directory / "store"), world.size)
    dist.init_process_group("gloo", store=store, rank=world_rank, world_size=world.size)
    timeout = timedelta(seconds=world.timeout_seconds)
    made: list[dict[tuple[int, ...], dist.ProcessGroup]] = [{}, {}]
    for ranks in world.groups:
        for groups in made:
            group = dist.new_group(list(ranks), timeout=timeout)
            if world_rank in ranks:
                groups[ranks] = group
    return Rank(world_rank, world.timeout_seconds, *made)


def _perform(call: Call, rank: Rank) -> Outcome:
    try:
        return Outcome(rank.world_rank, value=call.function(rank, *call.args))
    except Exception:
        return Outcome(rank.world_rank, traceback=traceback.format_exc())


def os_call(rank: Rank, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that knows nothing of ranks."""
    return function(*args)
