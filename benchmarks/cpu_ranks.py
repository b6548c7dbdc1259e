"""A vLLM plugin for more ranks than CPUs: sums of tensor parallelism by gloo, which sleeps while it waits.

The shared-memory all-reduce of vLLM's CPU build spins until the other ranks come. Where ranks share a CPU, one that
spins keeps the one that it waits for from running.
"""

from pathlib import Path
from shutil import copy

NAME = "cpu_ranks"


def register() -> None:
    """Leave the shared-memory path off; vLLM then falls back to torch.distributed."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: PLC0415

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _self: False


def write_plugin(folder: Path) -> None:
    """Let vLLM find this module as the plugin `NAME`, in processes with `folder` on their path."""
    metadata = folder / f"{NAME}-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n")
    # A copy, so that nothing else of this folder is on the path of the servers.
    copy(__file__, folder / f"{NAME}.py")
