from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.plan import BytesPerBlock, LayerCache, plan_cache


def cache(number, page_size_bytes=1152, part="attn"):
    return LayerCache(f"model.layers.{number}.{part}", page_size_bytes)


SPARSE = [cache(number) for number in range(5)] + [cache(number, 132, "indexer") for number in (0, 3)]


def test_bundles_are_given_to_owners_in_execution_order():
    plan = plan_cache([cache(number) for number in (10, 2, 1, 0)], group_size=2)

    assert [bundle.layer_number for bundle in plan.owned_bundles(0)] == [0, 1]
    assert [bundle.layer_number for bundle in plan.owned_bundles(1)] == [2, 10]


def test_all_caches_of_a_layer_have_one_owner():
    plan = plan_cache(SPARSE, group_size=5)

    assert [len(plan.owned_bundles(rank)) for rank in range(5)] == [1] * 5
    assert [component.name for component in plan.owned_bundles(3)[0].components] == [
        "model.layers.3.attn",
        "model.layers.3.indexer",
    ]


@given(st.permutations(SPARSE), st.integers(1, 9))
def test_the_plan_does_not_depend_on_the_order_of_the_caches(caches, group_size):
    plan = plan_cache(caches, group_size=group_size, draft_names={"model.layers.4.attn"})
    sorted_plan = plan_cache(SPARSE, group_size=group_size, draft_names={"model.layers.4.attn"})

    assert plan == sorted_plan
    assert plan.digest == sorted_plan.digest


def test_draft_caches_are_not_partitioned():
    plan = plan_cache(SPARSE, group_size=2, draft_names={"model.layers.4.attn"})

    assert plan.draft_caches == (cache(4),)
    assert [bundle.layer_number for bundle in plan.bundles] == [0, 1, 2, 3]


def test_a_stage_with_draft_layers_only_has_no_scratch():
    plan = plan_cache([cache(61)], group_size=8, draft_names={"model.layers.61.attn"})

    assert plan.bytes_per_block(3) == BytesPerBlock(owned=0, draft=1152, scratch=0)


def test_a_block_costs_owned_bundles_draft_caches_and_two_of_the_largest_bundle():
    plan = plan_cache(SPARSE, group_size=2, draft_names={"model.layers.4.attn"})
    scratch = 2 * (1152 + 132)

    assert plan.bytes_per_block(0) == BytesPerBlock(owned=2 * 1152 + 132, draft=1152, scratch=scratch)
    assert plan.bytes_per_block(1) == BytesPerBlock(owned=2 * 1152 + 132, draft=1152, scratch=scratch)
    assert plan.bytes_per_block(0).total == 2436 + 1152 + 2568


def test_every_rank_pays_for_the_largest_bundle_whoever_owns_it():
    plan = plan_cache([cache(0), cache(1, 9000), cache(2), cache(3)], group_size=2)

    assert plan.bytes_per_block(1) == BytesPerBlock(owned=2 * 1152, draft=0, scratch=2 * 9000)


def test_without_kvpp_a_block_costs_every_layer():
    plan = plan_cache(SPARSE, group_size=2, draft_names={"model.layers.4.attn"})

    assert plan.full_bytes_per_block == 5 * 1152 + 2 * 132


def test_a_rank_that_owns_no_layer_pays_for_scratch_only():
    plan = plan_cache([cache(0), cache(1)], group_size=8)

    assert plan.bytes_per_block(7) == BytesPerBlock(owned=0, draft=0, scratch=2 * 1152)


@given(st.integers(1, 40), st.integers(1, 16))
def test_the_ranks_together_own_every_bundle_once(num_layers, group_size):
    plan = plan_cache([cache(number) for number in range(num_layers)], group_size=group_size)

    assert tuple(bundle for rank in range(group_size) for bundle in plan.owned_bundles(rank)) == plan.bundles


def test_plans_that_differ_in_one_page_size_have_different_digests():
    digests = {plan_cache([cache(0), cache(1, page)], group_size=2).digest for page in (1152, 1280)}

    assert len(digests) == 2


def test_plans_that_differ_in_group_size_have_different_digests():
    assert plan_cache(SPARSE, group_size=5).digest != plan_cache(SPARSE, group_size=6).digest


def test_plans_that_differ_in_draft_layers_have_different_digests():
    without = plan_cache(SPARSE, group_size=2)

    assert without.digest != plan_cache(SPARSE, group_size=2, draft_names={"model.layers.4.attn"}).digest
