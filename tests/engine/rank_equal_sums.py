"""A vLLM plugin for tests: tensor parallel sums with the same bits on every rank.

The shared-memory all-reduce of vLLM's CPU build lets each of more than two ranks add in an order of its own, so that
ranks differ in the last bits, and with them the caches that should be copies of each other. gloo's sums do not. With
KVPP all ranks read the owner's bits; only where all had those bits before can the results be equal bit for bit.
"""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def register() -> None:
    """Leave the shared-memory path off; vLLM then falls back to torch.distributed."""
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
