from types import SimpleNamespace

import pytest
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, KVTransferConfig

from vllm_kvpp.deployment import Deployment, Speculation
from vllm_kvpp.vllm_seam import deployment as deployment_module
from vllm_kvpp.vllm_seam.deployment import CACHE_UPDATE_OP, describe_deployment


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    """A platform with an attention op, and no breakable graphs whatever the environment says."""
    platform = SimpleNamespace(opaque_attention_op=lambda: True)
    monkeypatch.setattr(deployment_module, "current_platform", platform)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    return platform


def make_config(*, parallel=None, model=None, text_config=None, **changes):
    """A configuration of DeepSeek-V3 on 8 ranks, eager, with vLLM's own compilation configuration."""
    parallel = {
        "tensor_parallel_size": 8,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
        "enable_elastic_ep": False,
        "enable_fault_tolerance": False,
    } | (parallel or {})
    model = {
        "architecture": "DeepseekV3ForCausalLM",
        "use_mla": True,
        "is_hybrid": False,
        "enable_sleep_mode": False,
        "hf_text_config": SimpleNamespace(**(text_config or {})),
    } | (model or {})
    parts = {
        "compilation_config": CompilationConfig(mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode.NONE),
        "attention_config": SimpleNamespace(hisparse_config=None),
        "cache_config": cache_config(),
        "kv_transfer_config": None,
        "speculative_config": None,
        "use_v2_model_runner": False,
    } | changes
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=SimpleNamespace(**model), **parts)


def cache_config(**changes):
    return SimpleNamespace(**({"kv_offloading_size": None, "kv_cache_dtype_skip_layers": []} | changes))


def speculative_config(method="mtp", *, varying=None, adaptive=False):
    return SimpleNamespace(
        method=method, num_speculative_tokens_per_batch_size=varying, enable_adaptive_verification=adaptive
    )


def piecewise(**settings):
    return CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.PIECEWISE, **settings)


def test_an_eager_mla_model_is_described_with_its_sizes():
    assert describe_deployment(make_config()) == Deployment(
        tensor_parallel_size=8, architecture="DeepseekV3ForCausalLM", cache_update_splits_graph=True
    )


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"parallel": {"tensor_parallel_size": 4}}, "tensor_parallel_size", 4),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size", 2),
        ({"parallel": {"enable_fault_tolerance": True}}, "uses_fault_tolerance", True),
        ({"use_v2_model_runner": True}, "uses_model_runner_v2", True),
        ({"parallel": {"decode_context_parallel_size": 8}}, "decode_context_parallel_size", 8),
        ({"parallel": {"use_ubatching": True}}, "uses_microbatches", True),
        ({"parallel": {"enable_elastic_ep": True}}, "uses_elastic_ep", True),
        ({"model": {"use_mla": False}}, "is_mla", False),
        ({"model": {"is_hybrid": True}}, "is_hybrid", True),
        ({"model": {"enable_sleep_mode": True}}, "uses_sleep_mode", True),
        ({"text_config": {"compress_ratios": [1, 4, 128]}}, "is_hybrid", True),
        ({"text_config": {"compress_ratios": None}}, "is_hybrid", False),
        ({"text_config": {"index_topk": 2048}}, "is_sparse", True),
        ({"attention_config": SimpleNamespace(hisparse_config=object())}, "uses_hisparse", True),
        ({"cache_config": cache_config(kv_offloading_size=4.0)}, "uses_offloading", True),
        ({"cache_config": cache_config(kv_cache_dtype_skip_layers=["0"])}, "has_mixed_cache_types", True),
        ({"text_config": {"index_topk": None}}, "is_sparse", False),
        ({"speculative_config": speculative_config()}, "speculation", Speculation("mtp")),
        (
            {"speculative_config": speculative_config("dspark", varying=[[1, 8, 3]], adaptive=True)},
            "speculation",
            Speculation("dspark", num_tokens_varies=True, uses_adaptive_verification=True),
        ),
    ],
)
def test_a_fact_of_the_configuration_is_described(changes, field, value):
    assert getattr(describe_deployment(make_config(**changes)), field) == value


def test_a_connector_is_described_with_its_role():
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer")
    described = describe_deployment(make_config(kv_transfer_config=transfer))

    assert (described.kv_connector, described.kv_role) == ("NixlConnector", "kv_consumer")


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_a_graph_mode_is_described_by_its_name(mode):
    described = describe_deployment(make_config(compilation_config=CompilationConfig(cudagraph_mode=mode)))

    assert described.graph_mode == mode.name


@pytest.mark.parametrize("mode", list(CompilationMode))
def test_a_compilation_mode_is_described_by_its_name(mode):
    described = describe_deployment(make_config(compilation_config=CompilationConfig(mode=mode)))

    assert described.compile_mode == mode.name


def test_modes_that_are_not_decided_count_as_none():
    undecided = CompilationConfig()
    undecided.mode = undecided.cudagraph_mode = None
    described = describe_deployment(make_config(compilation_config=undecided))

    assert (described.graph_mode, described.compile_mode) == ("NONE", "NONE")


@pytest.mark.parametrize(
    ("settings", "splits"),
    [
        ({}, True),
        ({"splitting_ops": [CACHE_UPDATE_OP, "vllm::other"]}, True),
        ({"splitting_ops": ["vllm::other"]}, False),
        ({"splitting_ops": []}, False),
        ({"use_inductor_graph_partition": True}, False),
        ({"pass_config": {"fuse_attn_quant": True}}, False),
    ],
)
def test_the_cache_update_splits_the_graph_unless_a_setting_keeps_it_inside(settings, splits):
    described = describe_deployment(make_config(compilation_config=piecewise(**settings)))

    assert described.cache_update_splits_graph is splits


def test_a_fusion_that_replaces_the_cache_update_keeps_it_inside_whatever_the_splitting_ops():
    compilation = piecewise(splitting_ops=[CACHE_UPDATE_OP])
    # Set afterwards: on CPU vLLM takes it back.
    compilation.pass_config.fuse_rope_kvcache_cat_mla = True

    assert not describe_deployment(make_config(compilation_config=compilation)).cache_update_splits_graph


@pytest.mark.parametrize(
    ("settings", "splits"),
    [({}, True), ({"use_inductor_graph_partition": True}, False), ({"pass_config": {"fuse_attn_quant": True}}, False)],
)
def test_splitting_ops_that_are_not_decided_are_described_as_vllm_will_decide_them(settings, splits):
    compilation = piecewise(**settings)
    described_before = describe_deployment(make_config(compilation_config=compilation))
    compilation.set_splitting_ops_for_v1(all2all_backend="allgather_reducescatter")

    assert described_before.cache_update_splits_graph is splits
    assert (CACHE_UPDATE_OP in (compilation.splitting_ops or [])) is splits


def test_a_platform_without_an_attention_op_calls_attention_directly(platform):
    platform.opaque_attention_op = lambda: False

    assert describe_deployment(make_config()).uses_direct_attention_call


def test_breakable_graphs_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")

    assert describe_deployment(make_config()).uses_breakable_graph
