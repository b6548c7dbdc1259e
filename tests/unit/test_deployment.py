import dataclasses
import re

import pytest

from vllm_kvpp.deployment import Deployment, Speculation, find_refusals

GOOD = Deployment(tensor_parallel_size=8, architecture="DeepseekV3ForCausalLM")

DCP = "KVPP and DCP cannot be enabled at the same time."
DECODE_ONLY = "KVPP must be disabled on the decode-only node."
CONNECTOR = "KVPP supports P/D disaggregation with MooncakeConnectorV2 only."
EXECUTION = "KVPP supports eager execution or PIECEWISE only."
MODEL = "KVPP currently supports only non-hybrid MLA models."
SPECULATION = "KVPP currently supports only a fixed number of speculative tokens."
METHOD = "KVPP supports speculative decoding with mtp or dspark only."

# The start of the reason, what was found as the reason shows it, and what makes the deployment so.
CASES = {
    "dcp": (DCP, "decode_context_parallel_size is 8", {"decode_context_parallel_size": 8}),
    "pcp": (
        "KVPP supports prefill context parallelism with model runner V2 only",
        "prefill_context_parallel_size is 2, and vLLM chose V1",
        {"prefill_context_parallel_size": 2, "uses_model_runner_v2": False},
    ),
    "dual-batch": ("KVPP does not support dual-batch overlap", "enable_dbo", {"uses_microbatches": True}),
    "fault-tolerance": (
        "KVPP does not support fault tolerance",
        "enable_fault_tolerance is true; remove it",
        {"uses_fault_tolerance": True},
    ),
    "elastic-ep": ("KVPP does not support elastic expert parallelism", "enable_elastic_ep", {"uses_elastic_ep": True}),
    "consumer": (DECODE_ONLY, "kv_role is kv_consumer", {"kv_role": "kv_consumer"}),
    "connector": (CONNECTOR, "kv_connector is NixlConnector", {"kv_connector": "NixlConnector", "kv_role": "kv_both"}),
    "older-mooncake": (
        CONNECTOR,
        "kv_connector is MooncakeConnector;",
        {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"},
    ),
    "unproven-mooncake": (
        "KVPP with MooncakeConnectorV2 is not proven yet",
        "kv_connector is MooncakeConnectorV2",
        {"kv_connector": "MooncakeConnectorV2", "kv_role": "kv_producer"},
    ),
    "full": (EXECUTION, "cudagraph_mode is FULL;", {"graph_mode": "FULL"}),
    "full-and-piecewise": (
        EXECUTION,
        "cudagraph_mode is FULL_AND_PIECEWISE",
        {"graph_mode": "FULL_AND_PIECEWISE"},
    ),
    "full-decode-only": (EXECUTION, "cudagraph_mode is FULL_DECODE_ONLY", {"graph_mode": "FULL_DECODE_ONLY"}),
    "breakable-graph": (
        "KVPP cannot run inside breakable CUDA graphs",
        "VLLM_USE_BREAKABLE_CUDAGRAPH is on",
        {"graph_mode": "PIECEWISE", "uses_breakable_graph": True},
    ),
    "update-in-graph": (
        "KVPP needs the cache update outside the recorded graph pieces.",
        "splitting_ops lacks vllm::unified_mla_kv_cache_update",
        {"graph_mode": "PIECEWISE", "cache_update_splits_graph": False},
    ),
    "stock-compile": (
        "KVPP does not support compilation mode STOCK_TORCH_COMPILE.",
        "mode is 1",
        {"compile_mode": "STOCK_TORCH_COMPILE"},
    ),
    "direct-call": (
        "KVPP needs attention behind a custom op when the model is compiled.",
        "this platform has none; add --enforce-eager",
        {"compile_mode": "VLLM_COMPILE", "uses_direct_attention_call": True},
    ),
    "layout": (
        "KVPP needs a KV cache layout with whole layers.",
        "VLLM_KV_CACHE_LAYOUT is BLHNC; set it to LBNHC",
        {"kv_cache_layout": "BLHNC"},
    ),
    "sleep": ("KVPP does not support sleep mode", "enable_sleep_mode is true", {"uses_sleep_mode": True}),
    "no-mla": (MODEL, "LlamaForCausalLM does not use MLA", {"is_mla": False, "architecture": "LlamaForCausalLM"}),
    "hybrid": (MODEL, "KimiLinearForCausalLM is hybrid", {"is_hybrid": True, "architecture": "KimiLinearForCausalLM"}),
    "sparse": (
        "KVPP supports sparse attention in eager execution only",
        "DeepseekV32ForCausalLM has an attention indexer; add --enforce-eager",
        {"is_sparse": True, "architecture": "DeepseekV32ForCausalLM", "compile_mode": "VLLM_COMPILE"},
    ),
    "mixed": (
        "KVPP needs one cache type for all layers",
        "kv_cache_dtype_skip_layers is set; remove --kv-cache-dtype-skip-layers",
        {"has_mixed_cache_types": True},
    ),
    "offloading": (
        "KVPP does not support offloading of the KV cache",
        "kv_offloading_size is set; remove --kv-offloading-size",
        {"uses_offloading": True, "kv_connector": "OffloadingConnector"},
    ),
    "hisparse": ("KVPP does not support HiSparse", "hisparse_config is set; remove it", {"uses_hisparse": True}),
    "ngram": (METHOD, "method is ngram", {"speculation": Speculation("ngram")}),
    "eagle3": (METHOD, "method is eagle3", {"speculation": Speculation("eagle3")}),
    "varying-tokens": (
        SPECULATION,
        "num_speculative_tokens_per_batch_size is set",
        {"speculation": Speculation("mtp", num_tokens_varies=True)},
    ),
    "adaptive": (
        SPECULATION,
        "enable_adaptive_verification is true",
        {"speculation": Speculation("dspark", uses_adaptive_verification=True)},
    ),
}
CASE_IDS = list(CASES)
SETTINGS = re.compile(
    r"decode_context_parallel_size|prefill_context_parallel_size|enable_dbo|enable_elastic_ep|enable_fault_tolerance|kv_role|kv_connector"
    r"|cudagraph_mode|VLLM_USE_BREAKABLE_CUDAGRAPH|splitting_ops|\bmode is\b|--enforce-eager"
    r"|enable_sleep_mode|hisparse_config|kv_offloading_size|kv_cache_dtype_skip_layers|VLLM_KV_CACHE_LAYOUT|enable_kvpp"
    r"|\bmethod is\b|num_speculative_tokens_per_batch_size|enable_adaptive_verification"
)


def refusals_with(**changes):
    return find_refusals(dataclasses.replace(GOOD, **changes))


@pytest.mark.parametrize("case", CASE_IDS)
def test_a_wrong_combination_is_refused_with_its_sentence_and_what_was_found(case):
    sentence, found, changes = CASES[case]
    (reason,) = refusals_with(**changes)

    assert reason.startswith(sentence)
    assert found in reason


@pytest.mark.parametrize("case", CASE_IDS)
def test_every_reason_names_a_setting_and_ends_with_a_remedy(case):
    (reason,) = refusals_with(**CASES[case][2])
    detail = re.search(r" \(.+; (?:set|add|remove|use|leave) .+\)$", reason)

    assert detail, reason
    assert SETTINGS.search(detail.group()), reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"graph_mode": "PIECEWISE", "compile_mode": "VLLM_COMPILE"},
        {"graph_mode": "NONE", "compile_mode": "VLLM_COMPILE"},
        {"graph_mode": "NONE", "cache_update_splits_graph": False},
        {"graph_mode": "NONE", "uses_breakable_graph": True},
        {"compile_mode": "NONE", "uses_direct_attention_call": True},
        {"speculation": Speculation("mtp")},
        {"speculation": Speculation("dspark")},
    ],
)
def test_a_supported_deployment_has_no_refusal(changes):
    assert refusals_with(**changes) == ()


def test_all_reasons_that_apply_are_listed_at_once():
    reasons = refusals_with(
        decode_context_parallel_size=4,
        kv_connector="NixlConnector",
        kv_role="kv_consumer",
        graph_mode="FULL",
        is_mla=False,
        speculation=Speculation("ngram", num_tokens_varies=True, uses_adaptive_verification=True),
    )

    assert [reason.partition(" (")[0] for reason in reasons] == [
        DCP,
        DECODE_ONLY,
        CONNECTOR,
        EXECUTION,
        MODEL,
        METHOD,
        SPECULATION,
        SPECULATION,
    ]


def test_a_decode_only_node_is_told_to_disable_kvpp_whatever_its_connector_is():
    (reason,) = refusals_with(kv_connector="MooncakeConnectorV2", kv_role="kv_consumer")

    assert reason.startswith(DECODE_ONLY)


def test_a_hybrid_model_with_mla_layers_is_refused_once():
    (reason,) = refusals_with(is_mla=True, is_hybrid=True, is_sparse=True)

    assert reason.startswith(MODEL)


def test_prefill_context_parallelism_is_accepted_with_model_runner_v2():
    assert refusals_with(prefill_context_parallel_size=2, uses_model_runner_v2=True) == ()


def test_a_sparse_model_runs_eagerly():
    assert refusals_with(is_sparse=True) == ()


def test_a_sparse_model_in_graphs_is_refused_even_if_nothing_is_compiled():
    (reason,) = refusals_with(is_sparse=True, graph_mode="PIECEWISE")

    assert reason.startswith("KVPP supports sparse attention in eager execution only")


@pytest.mark.parametrize(("tp_size", "pcp_size", "group_size"), [(1, 1, 1), (8, 1, 8), (4, 2, 8)])
def test_the_group_spans_tensor_and_prefill_context_parallel_ranks(tp_size, pcp_size, group_size):
    deployment = Deployment(tensor_parallel_size=tp_size, prefill_context_parallel_size=pcp_size)

    assert deployment.group_size == group_size


@pytest.mark.parametrize("layout", [None, "LBNHC", "LBHNC", "NHD", "HND"])
def test_layouts_with_whole_layers_are_fine(layout):
    assert refusals_with(kv_cache_layout=layout) == ()
