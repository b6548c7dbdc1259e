import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.plan import assign_owner_ranks, split_into_groups

counts = st.integers(0, 200)
group_sizes = st.integers(1, 64)


def deal_one_by_one(num_bundles, group_size):
    """The slow obvious way: hand out shares round by round, then lay the ranks' shares in a row."""
    shares = [0] * group_size
    for index in range(num_bundles):
        shares[index % group_size] += 1
    owners = []
    for rank, share in enumerate(shares):
        owners += [rank] * share
    return tuple(owners)


@given(counts, group_sizes)
def test_owners_equal_those_of_dealing_one_by_one(num_bundles, group_size):
    assert assign_owner_ranks(num_bundles, group_size) == deal_one_by_one(num_bundles, group_size)


@given(counts, group_sizes)
def test_every_rank_owns_one_contiguous_range(num_bundles, group_size):
    owners = assign_owner_ranks(num_bundles, group_size)

    assert list(owners) == sorted(owners)


@given(counts, group_sizes)
def test_no_two_ranks_differ_by_more_than_one_layer(num_bundles, group_size):
    owners = assign_owner_ranks(num_bundles, group_size)
    shares = [owners.count(rank) for rank in range(group_size)]

    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("num_bundles", "group_size", "shares"),
    [
        (61, 8, [8, 8, 8, 8, 8, 7, 7, 7]),
        (78, 8, [10, 10, 10, 10, 10, 10, 9, 9]),
        (27, 2, [14, 13]),
        (6, 2, [3, 3]),
        (5, 1, [5]),
    ],
)
def test_the_first_ranks_take_the_remainder(num_bundles, group_size, shares):
    owners = assign_owner_ranks(num_bundles, group_size)

    assert [owners.count(rank) for rank in range(group_size)] == shares


def test_with_fewer_layers_than_ranks_the_last_ranks_own_none():
    assert assign_owner_ranks(3, 8) == (0, 1, 2)


def test_a_stage_without_target_layers_has_no_owners():
    assert assign_owner_ranks(0, 8) == ()


def groups_of(world_size, *, dp=1, pp=1, pcp=1, tp=1):
    return split_into_groups(
        world_size,
        data_parallel_size=dp,
        pipeline_parallel_size=pp,
        prefill_context_parallel_size=pcp,
        tensor_parallel_size=tp,
    )


def group_as_vllm_numbers_ranks(world_size, dp, pp, pcp, tp):
    """The slow obvious way: number every rank by its place in `[external DP, DP, PP, PCP, TP]` and sort by the rest."""
    groups = {}
    for rank in range(world_size):
        replica, within = divmod(rank, pp * pcp * tp)
        stage = within // (pcp * tp)
        groups.setdefault((*divmod(replica, dp), stage), []).append(rank)
    return tuple(tuple(groups[place]) for place in sorted(groups))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_groups_equal_those_of_sorting_ranks_by_replica_and_stage(external_dp, dp, pp, pcp, tp):
    world_size = external_dp * dp * pp * pcp * tp

    assert groups_of(world_size, dp=dp, pp=pp, pcp=pcp, tp=tp) == group_as_vllm_numbers_ranks(
        world_size, dp, pp, pcp, tp
    )


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_every_rank_of_the_world_is_in_exactly_one_group(external_dp, dp, pp, pcp, tp):
    world_size = external_dp * dp * pp * pcp * tp
    groups = groups_of(world_size, dp=dp, pp=pp, pcp=pcp, tp=tp)

    assert sorted(rank for group in groups for rank in group) == list(range(world_size))


@pytest.mark.parametrize(
    ("world_size", "sizes", "groups"),
    [
        (2, {"tp": 2}, ((0, 1),)),
        (4, {"pp": 2, "tp": 2}, ((0, 1), (2, 3))),
        (4, {"dp": 2, "tp": 2}, ((0, 1), (2, 3))),
        (4, {"pcp": 2, "tp": 2}, ((0, 1, 2, 3),)),
        (8, {"pp": 2, "pcp": 2, "tp": 2}, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (4, {"tp": 1, "pp": 4}, ((0,), (1,), (2,), (3,))),
    ],
)
def test_groups_never_cross_a_stage_or_a_replica(world_size, sizes, groups):
    assert groups_of(world_size, **sizes) == groups


def test_a_world_of_several_external_replicas_repeats_the_groups():
    assert groups_of(4, tp=2) == ((0, 1), (2, 3))


@pytest.mark.parametrize("world_size", [0, -4, 1, 3, 6])
def test_a_world_that_is_no_whole_number_of_replicas_is_refused(world_size):
    with pytest.raises(ValueError, match=f"a world of {world_size} ranks is not a whole number of replicas of 4 ranks"):
        groups_of(world_size, pp=2, tp=2)
