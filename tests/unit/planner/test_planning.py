import pytest

from vllm_kvpp.planner.errors import PlannerError


def test_the_type_of_the_cache_follows_the_device_and_is_noted(plan):
    found = plan("glm-5.2", gpu="h200", kv_memory="40GiB", kv_cache_dtype="fp8")

    assert found.kv_cache_dtype == "fp8_ds_mla"
    assert found.notes == ("On Hopper vLLM stores fp8 of sparse attention as fp8_ds_mla; planned so.",)


def test_dcp_is_offered_for_dense_attention_and_for_the_packed_type(plan):
    assert plan("deepseek-v3", kv_memory="40GiB").dcp_refusal is None
    assert plan("glm-5.2", kv_memory="40GiB", kv_cache_dtype="fp8_ds_mla").dcp_refusal is None
    assert "fp8_ds_mla" in plan("glm-5.2", kv_memory="40GiB").dcp_refusal


def test_the_longest_request_is_at_most_what_the_model_was_made_for(plan):
    assert plan("deepseek-v3", kv_memory="40GiB").fit.longest_request == 163_840
    small = plan("deepseek-v3", kv_memory="1GiB", block_size=16)
    assert small.fit.longest_request == (small.capacity.num_blocks - 1) * 16


def test_one_block_is_held_back_from_requests(plan):
    found = plan("deepseek-v3", kv_memory="40GiB", context=30_000)

    assert found.fit_without.num_requests == (found.capacity.num_blocks_without - 1) // 469
    assert found.fit.num_requests == (found.capacity.num_blocks - 1) // 469
    # A block of each of 8 ranks holds 512 tokens together.
    assert found.fit_with_dcp.num_requests == (found.capacity.num_blocks_without - 1) // 59


@pytest.mark.parametrize(("block_size", "num_requests"), [(64, 1), (65_536, 0)])
def test_a_request_needs_a_block_beside_the_one_held_back(block_size, num_requests, plan):
    found = plan("deepseek-v2-lite", tp_size=2, kv_memory=f"{27 * 1152 * 65_536}B", block_size=block_size, context=64)

    assert min(found.fit.num_requests, 1) == num_requests


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "No memory is given; use --kv-memory.*--gpu"),
        ({"kv_memory": "1GiB", "kv_cache_dtype": "int3"}, "--kv-cache-dtype is 'int3'"),
        ({"kv_memory": "1GiB", "dtype": "int3"}, "--dtype is 'int3'"),
        ({"kv_memory": "1GiB", "draft": "eagle"}, "--draft is 'eagle'"),
        ({"kv_memory": "1GiB", "link": "wire"}, "--link is 'wire'"),
        ({"gpu": "tpu"}, "--gpu is 'tpu'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(options, expected, plan):
    with pytest.raises(PlannerError, match=expected):
        plan("deepseek-v3", **options)
