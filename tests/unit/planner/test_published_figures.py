"""Figures that others have published, which the planner has to reproduce from a model's configuration alone."""

import pytest

from vllm_kvpp.planner.config_file import read_config
from vllm_kvpp.planner.devices import GIB
from vllm_kvpp.planner.model import read_model
from vllm_kvpp.planner.weights import read_weights


def test_kimi_k2_holds_the_tokens_that_vllm_recipes_115_reports(plan):
    # vLLM recipes #115: Kimi-K2-Thinking, TP8, bf16, 46.80 GiB: 715,072 tokens, and 5,721,088 with DCP8.
    # Kimi-K2-Instruct has the same layers.
    found = plan("moonshotai/Kimi-K2-Instruct", tp_size=8, kv_memory="46.80GiB")
    capacity = found.capacity

    assert capacity.stages[0].plan.full_bytes_per_block // capacity.block_size == 70_272
    assert capacity.num_tokens_without == 715_072
    assert found.fit_with_dcp.num_tokens == pytest.approx(5_721_088, rel=1e-3)


def test_the_estimate_of_a_device_comes_near_what_vllm_had_there(plan):
    # The same report: 46.80 GiB were left on each H200, with vLLM's default of that time, 0.9. Kimi-K2-Thinking and
    # Kimi-K2.5 have the same 4-bit weights in size.
    (memory,) = plan("moonshotai/Kimi-K2.5", tp_size=8, gpu="h200", gpu_memory_utilization=0.9).memories

    assert memory.available_bytes / GIB == pytest.approx(46.80, rel=0.05)


def test_deepseek_v2_lite_needs_0_95_gib_for_32_768_tokens_as_in_vllm_15871(plan):
    # vllm-project/vllm#15871: 0.95 GiB for one request of 32,768 tokens; rounded to two digits there.
    capacity = plan("DeepSeek-V2-Lite", tp_size=2, kv_memory="2GiB", block_size=16).capacity
    num_bytes = 32_768 // 16 * capacity.stages[0].plan.full_bytes_per_block

    assert round(num_bytes / GIB, 2) == 0.95


def test_glm_5_2_in_fp8_with_a_draft_layer_costs_54_728_bytes_a_token(plan):
    # Published for GLM-5.2, fp8_ds_mla and one MTP layer: 54,728 bytes a token, 79 main and 22 indexer caches.
    options = {"kv_cache_dtype": "fp8_ds_mla", "draft": "mtp", "kv_memory": "40GiB"}
    cache_plan = plan("zai-org/GLM-5.2", **options).capacity.stages[0].plan
    targets = [cache for bundle in cache_plan.bundles for cache in bundle.components]
    names = [cache.name for cache in (*targets, *cache_plan.draft_caches)]

    assert cache_plan.full_bytes_per_block == 54_728 * 64
    assert sum(name.endswith("self_attn.attn") for name in names) == 79
    assert sum(name.endswith("indexer.k_cache") for name in names) == 22


def test_glm_5_2_gains_what_the_vendor_of_kvpp_measured(plan):
    # vllm-ascend, feature guide kvpp.md: GLM-5.2, TP8, one node: 235,008 -> 1,467,904 tokens = 6.25x.
    # The memory is not published; it follows from the first figure, as 1,836 blocks of 128 tokens.
    # The formula gives 6.34x: the rest is memory that their run needs beside the cache with KVPP on, and that neither
    # the guide nor the formula counts.
    num_bytes = 1_836 * 128 * 92_628
    capacity = plan("zai-org/GLM-5.2", tp_size=8, kv_memory=f"{num_bytes}B", block_size=128).capacity
    rank = capacity.stages[0].ranks[0]

    assert capacity.num_tokens_without == 235_008
    assert rank.bytes_per_block.owned == (10 * 1152 + 4 * 132) * 128
    assert rank.bytes_per_block.scratch == 2 * 1284 * 128
    assert capacity.stages[0].plan.full_bytes_per_block / rank.bytes_per_block.total == pytest.approx(6.34, abs=0.005)
    assert capacity.factor == pytest.approx(6.25, rel=0.02)
    assert capacity.num_tokens == pytest.approx(1_467_904, rel=0.02)


def test_glm_5_2_on_two_uneven_stages_gains_what_the_vendor_of_kvpp_measured(plan):
    # The same guide: TP8 and PP2 with 38 and 40 layers: 555,392 -> 2,972,416 tokens = 5.35x. The larger stage limits
    # the first figure, from which its memory follows; that of the other stage is taken to be the same.
    num_bytes = 4_339 * 128 * 47_400
    options = {"tp_size": 8, "pp_size": 2, "pp_partition": "38,40", "block_size": 128}
    capacity = plan("zai-org/GLM-5.2", kv_memory=f"{num_bytes}B", **options).capacity

    assert capacity.stages[1].plan.full_bytes_per_block == 47_400 * 128
    assert capacity.num_tokens_without == 555_392
    assert capacity.factor == pytest.approx(5.35, rel=0.02)
    assert capacity.num_tokens == pytest.approx(2_972_416, rel=0.02)


@pytest.mark.parametrize(
    ("model", "num_billions"),
    [
        # Model cards: parameters without the draft layer.
        ("deepseek-ai/DeepSeek-V3", 671),
        ("deepseek-ai/DeepSeek-V2", 236),
        ("deepseek-ai/DeepSeek-V2-Lite", 15.7),
        ("moonshotai/Kimi-K2-Instruct", 1_026),
        ("zai-org/GLM-5", 744),
    ],
)
def test_a_model_has_the_parameters_of_its_card(model, num_billions):
    shape = read_model(read_config(model))

    assert read_weights(shape).count_all(shape.num_layers) / 1e9 == pytest.approx(num_billions, rel=0.01)
