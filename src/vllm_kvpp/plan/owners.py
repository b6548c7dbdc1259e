"""Which rank of the KVPP group owns which layer, and which ranks form a group."""


def assign_owner_ranks(num_bundles: int, group_size: int) -> tuple[int, ...]:
    """Split bundles, in execution order, into contiguous balanced ranges over the group (R-OWN-1).

    The first `num_bundles % group_size` ranks own one bundle more than the others; with fewer bundles than ranks the
    last ranks own none.

    Returns:
        The owner rank of each bundle, never decreasing.
    """
    assert group_size > 0
    base, remainder = divmod(num_bundles, group_size)
    return tuple(rank for rank in range(group_size) for _ in range(base + int(rank < remainder)))


def split_into_groups(
    world_size: int,
    *,
    data_parallel_size: int,
    pipeline_parallel_size: int,
    prefill_context_parallel_size: int,
    tensor_parallel_size: int,
) -> tuple[tuple[int, ...], ...]:
    """List the world ranks of every KVPP group (R-RUN-7).

    vLLM numbers its ranks as `[external DP, DP, PP, PCP, TP]`, so PCP and TP together are consecutive ranks, and no
    group crosses a pipeline stage or a replica (R-RUN-6).

    Raises:
        ValueError: `world_size` is not a whole number of replicas.
    """
    group_size = prefill_context_parallel_size * tensor_parallel_size
    replica_size = data_parallel_size * pipeline_parallel_size * group_size
    if world_size <= 0 or world_size % replica_size:
        raise ValueError(f"a world of {world_size} ranks is not a whole number of replicas of {replica_size} ranks")
    return tuple(tuple(range(first, first + group_size)) for first in range(0, world_size, group_size))
