"""Published figures of real models and deployments, which the plan has to reproduce."""

import pytest

from vllm_kvpp.plan import LayerCache, fit_num_blocks, plan_cache

GIB = 1024**3

# Bytes of one token in one cache: (512 latent + 64 rope) bf16, the packed 8-bit latent, 128 fp8 and one fp32 scale.
MLA_BF16 = 1152
MLA_FP8 = 656
INDEXER = 132

# Layers of GLM-5.2 with an indexer of their own; the others take over the last one's choice.
GLM_INDEXER_LAYERS = (0, 1, *range(2, 75, 4))


def caches_of(num_layers, *, mla=MLA_BF16, indexers=(), block_size=1):
    caches = [LayerCache(f"model.layers.{number}.self_attn.attn", mla * block_size) for number in range(num_layers)]
    return caches + [
        LayerCache(f"model.layers.{number}.self_attn.indexer.k_cache", INDEXER * block_size) for number in indexers
    ]


def capacity_factor(plan, rank=0):
    return plan.full_bytes_per_block / plan.bytes_per_block(rank).total


def test_61_dense_layers_on_8_ranks_hold_6_1_times_the_tokens():
    assert capacity_factor(plan_cache(caches_of(61), group_size=8)) == 6.1


def test_glm_5_2_on_8_ranks_holds_6_34_times_the_tokens():
    plan = plan_cache(caches_of(78, indexers=GLM_INDEXER_LAYERS), group_size=8)

    assert plan.full_bytes_per_block == 92_628
    assert plan.bytes_per_block(0).owned == 10 * MLA_BF16 + 4 * INDEXER
    assert plan.bytes_per_block(0).scratch == 2 * 1284
    assert capacity_factor(plan) == pytest.approx(6.34, abs=0.005)


def test_rank_0_limits_glm_5_2():
    plan = plan_cache(caches_of(78, indexers=GLM_INDEXER_LAYERS), group_size=8)
    costs = [plan.bytes_per_block(rank).total for rank in range(8)]

    assert costs[0] == max(costs)


def test_glm_5_2_in_fp8_with_one_draft_layer_costs_54_728_bytes_a_token():
    caches = caches_of(79, mla=MLA_FP8, indexers=(*GLM_INDEXER_LAYERS, 78))
    draft_names = {cache.name for cache in caches if cache.layer_number == 78}
    plan = plan_cache(caches, group_size=8, draft_names=draft_names)

    assert plan.full_bytes_per_block == 54_728
    assert plan.bytes_per_block(7).draft == MLA_FP8 + INDEXER


def test_kimi_k2_holds_715_072_tokens_without_kvpp_and_about_6_1_times_as_many_with_it():
    block_size = 64
    available_bytes = int(46.80 * GIB)
    plan = plan_cache(caches_of(61, block_size=block_size), group_size=8)
    num_tokens = fit_num_blocks(plan, 0, available_bytes) * block_size

    assert available_bytes // plan.full_bytes_per_block * block_size == 715_072
    assert num_tokens / 715_072 == pytest.approx(6.1, rel=1e-3)


def test_deepseek_v2_lite_needs_0_95_gib_for_32_768_tokens():
    plan = plan_cache(caches_of(27), group_size=2)

    assert 32_768 * plan.full_bytes_per_block / GIB == pytest.approx(0.95, abs=0.005)
    assert capacity_factor(plan) == 27 / (14 + 2)


@pytest.mark.parametrize(("num_layers", "stage_factor"), [(38, 38 / 7), (40, 40 / 7)])
def test_a_stage_of_half_the_layers_gains_less_because_scratch_weighs_more(num_layers, stage_factor):
    plan = plan_cache(caches_of(num_layers), group_size=8)

    assert capacity_factor(plan) == stage_factor


def test_two_layers_on_two_ranks_lose_because_two_scratch_layers_cost_more_than_is_saved():
    assert capacity_factor(plan_cache(caches_of(2), group_size=2)) < 1
