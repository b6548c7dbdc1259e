"""What a deployment looks like in plain values, and the reasons why KVPP would refuse it (R-CFG-4)."""

from collections.abc import Iterator
from dataclasses import dataclass

SUPPORTED_SPECULATIVE_METHODS = ("mtp", "dspark")
SUPPORTED_GRAPH_MODES = ("NONE", "PIECEWISE")
# Blocks outermost: the pages of all layers alternate, so no layer lies in one range.
REFUSED_LAYOUTS = ("BLHNC", "BLNHC", "BHLNC")
PREFILL_CONNECTOR = "MooncakeConnectorV2"
RUN_EAGERLY = "add --enforce-eager"


@dataclass(frozen=True)
class Speculation:
    """How the deployment drafts tokens."""

    method: str
    num_tokens_varies: bool = False
    uses_adaptive_verification: bool = False


@dataclass(frozen=True)
class Deployment:
    """The facts that decide whether KVPP can run, without any vLLM type in them."""

    tensor_parallel_size: int
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    architecture: str = "unknown"
    is_mla: bool = True
    is_hybrid: bool = False
    is_sparse: bool = False
    kv_connector: str | None = None
    kv_role: str | None = None
    graph_mode: str = "NONE"
    compile_mode: str = "NONE"
    cache_update_splits_graph: bool = True
    uses_breakable_graph: bool = False
    uses_direct_attention_call: bool = False
    speculation: Speculation | None = None
    uses_model_runner_v2: bool = False
    uses_microbatches: bool = False
    uses_elastic_ep: bool = False
    uses_fault_tolerance: bool = False
    uses_sleep_mode: bool = False
    uses_hisparse: bool = False
    uses_offloading: bool = False
    has_mixed_cache_types: bool = False
    kv_cache_layout: str | None = None

    @property
    def group_size(self) -> int:
        """Ranks that hold the same MLA cache today, and share it with KVPP (R-CFG-2)."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size


def find_refusals(deployment: Deployment) -> tuple[str, ...]:
    """List every reason why KVPP cannot run, each with what was found and what to change."""
    return (
        *_refuse_parallelism(deployment),
        *_refuse_connectors(deployment),
        *_refuse_graphs(deployment),
        *_refuse_execution(deployment),
        *_refuse_model(deployment),
        *_refuse_speculation(deployment.speculation),
    )


def _refuse_parallelism(deployment: Deployment) -> Iterator[str]:
    dcp_size = deployment.decode_context_parallel_size
    if dcp_size != 1:
        yield (
            "KVPP and DCP cannot be enabled at the same time. "
            f"(decode_context_parallel_size is {dcp_size}; set it to 1)"
        )
    pcp_size = deployment.prefill_context_parallel_size
    if pcp_size != 1 and not deployment.uses_model_runner_v2:
        yield (
            "KVPP supports prefill context parallelism with model runner V2 only. "
            f"(prefill_context_parallel_size is {pcp_size}, and vLLM chose V1; set it to 1, or the environment "
            "variable VLLM_USE_V2_MODEL_RUNNER to 1)"
        )
    if deployment.uses_microbatches:
        yield (
            "KVPP does not support dual-batch overlap: two halves of a batch would share one scratch buffer. "
            "(enable_dbo or ubatch_size is set; remove it)"
        )
    if deployment.uses_elastic_ep:
        yield (
            "KVPP does not support elastic expert parallelism: its group is made once. "
            "(enable_elastic_ep is true; remove it)"
        )
    if deployment.uses_fault_tolerance:
        yield (
            "KVPP does not support fault tolerance: vLLM would go on behind a failed step with groups made anew, and "
            "KVPP's group is made once. (enable_fault_tolerance is true; remove it)"
        )


def _refuse_connectors(deployment: Deployment) -> Iterator[str]:
    if deployment.kv_role == "kv_consumer":
        yield "KVPP must be disabled on the decode-only node. (kv_role is kv_consumer; set enable_kvpp to false there)"
    if deployment.uses_offloading:
        yield (
            "KVPP does not support offloading of the KV cache: it would copy scratch buffers as if they were cache. "
            "(kv_offloading_size is set; remove --kv-offloading-size)"
        )
    if deployment.kv_connector is None or deployment.uses_offloading:
        return
    if deployment.kv_connector != PREFILL_CONNECTOR:
        yield (
            f"KVPP supports P/D disaggregation with {PREFILL_CONNECTOR} only. "
            f"(kv_connector is {deployment.kv_connector}; remove --kv-transfer-config)"
        )
    elif deployment.kv_role != "kv_consumer":
        yield (
            f"KVPP with {PREFILL_CONNECTOR} is not proven yet: a connector that reads every layer from one rank would "
            "send scratch buffers as if they were cache. "
            f"(kv_connector is {deployment.kv_connector}; remove --kv-transfer-config)"
        )


def _refuse_graphs(deployment: Deployment) -> Iterator[str]:
    if deployment.graph_mode not in SUPPORTED_GRAPH_MODES:
        yield (
            "KVPP supports eager execution or PIECEWISE only. "
            f'(cudagraph_mode is {deployment.graph_mode}; {RUN_EAGERLY}, or --compilation-config \'{{"cudagraph_mode": '
            '"PIECEWISE"}\')'
        )
    if deployment.graph_mode != "NONE" and deployment.uses_breakable_graph:
        yield (
            "KVPP cannot run inside breakable CUDA graphs: they record the cache update. "
            f"(VLLM_USE_BREAKABLE_CUDAGRAPH is on; set it to 0, or {RUN_EAGERLY})"
        )
    elif deployment.graph_mode == "PIECEWISE" and not deployment.cache_update_splits_graph:
        yield (
            "KVPP needs the cache update outside the recorded graph pieces. (splitting_ops lacks "
            "vllm::unified_mla_kv_cache_update, or a fusion pass replaces it; leave splitting_ops, "
            f"use_inductor_graph_partition and the rope/KV-cache fusions at their defaults, or {RUN_EAGERLY})"
        )


def _refuse_execution(deployment: Deployment) -> Iterator[str]:
    if deployment.compile_mode == "STOCK_TORCH_COMPILE":
        yield f"KVPP does not support compilation mode STOCK_TORCH_COMPILE. (mode is 1; {RUN_EAGERLY})"
    elif deployment.compile_mode != "NONE" and deployment.uses_direct_attention_call:
        yield (
            "KVPP needs attention behind a custom op when the model is compiled. "
            f"(this platform has none; {RUN_EAGERLY})"
        )
    if deployment.kv_cache_layout in REFUSED_LAYOUTS:
        yield (
            "KVPP needs a KV cache layout with whole layers. (the environment variable VLLM_KV_CACHE_LAYOUT is "
            f"{deployment.kv_cache_layout}; set it to LBNHC, or unset it)"
        )
    if deployment.uses_sleep_mode:
        yield "KVPP does not support sleep mode in this release. (enable_sleep_mode is true; remove it)"


def _refuse_model(deployment: Deployment) -> Iterator[str]:
    if not deployment.is_mla or deployment.is_hybrid:
        kind = "is hybrid" if deployment.is_hybrid else "does not use MLA"
        yield (
            "KVPP currently supports only non-hybrid MLA models. "
            f"({deployment.architecture} {kind}; set enable_kvpp to false)"
        )
    elif deployment.is_sparse and (deployment.graph_mode != "NONE" or deployment.compile_mode != "NONE"):
        yield (
            "KVPP supports sparse attention in eager execution only: compiled code reaches the indexer's cache without "
            f"waiting for it. ({deployment.architecture} has an attention indexer; {RUN_EAGERLY})"
        )
    if deployment.has_mixed_cache_types:
        yield (
            "KVPP needs one cache type for all layers: layers of different page sizes would share a scratch buffer. "
            "(kv_cache_dtype_skip_layers is set; remove --kv-cache-dtype-skip-layers)"
        )
    if deployment.uses_hisparse:
        yield (
            "KVPP does not support HiSparse: it keeps part of the cache on the host. "
            "(hisparse_config is set; remove it from --attention-config)"
        )


def _refuse_speculation(speculation: Speculation | None) -> Iterator[str]:
    if speculation is None:
        return
    if speculation.method not in SUPPORTED_SPECULATIVE_METHODS:
        methods = " or ".join(SUPPORTED_SPECULATIVE_METHODS)
        yield (
            "KVPP supports speculative decoding with mtp or dspark only. "
            f"(method is {speculation.method}; use {methods}, or remove --speculative-config)"
        )
    if speculation.num_tokens_varies:
        yield (
            "KVPP currently supports only a fixed number of speculative tokens. "
            "(num_speculative_tokens_per_batch_size is set; remove it)"
        )
    if speculation.uses_adaptive_verification:
        yield (
            "KVPP currently supports only a fixed number of speculative tokens. "
            "(enable_adaptive_verification is true; remove it)"
        )
