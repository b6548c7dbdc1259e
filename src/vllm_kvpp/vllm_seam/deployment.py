"""vLLM's configuration, translated into the plain facts that are validated."""

from typing import Any

from vllm import envs
from vllm.config import CompilationConfig, VllmConfig
from vllm.platforms import current_platform

from vllm_kvpp.deployment import Deployment, Speculation

CACHE_UPDATE_OP = "vllm::unified_mla_kv_cache_update"


def describe_deployment(vllm_config: VllmConfig) -> Deployment:
    """Collect the facts from a configuration that the platform has completed."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    transfer = vllm_config.kv_transfer_config
    compilation = vllm_config.compilation_config
    text_config = model.hf_text_config
    return Deployment(
        tensor_parallel_size=parallel.tensor_parallel_size,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        architecture=model.architecture,
        is_mla=model.use_mla,
        is_hybrid=model.is_hybrid or _has_compressed_layers(text_config),
        is_sparse=getattr(text_config, "index_topk", None) is not None,
        kv_connector=transfer.kv_connector if transfer is not None else None,
        kv_role=transfer.kv_role if transfer is not None else None,
        graph_mode=compilation.cudagraph_mode.name if compilation.cudagraph_mode is not None else "NONE",
        compile_mode=compilation.mode.name if compilation.mode is not None else "NONE",
        cache_update_splits_graph=_cache_update_splits_graph(compilation),
        uses_breakable_graph=bool(envs.VLLM_USE_BREAKABLE_CUDAGRAPH),
        uses_direct_attention_call=not current_platform.opaque_attention_op(),
        speculation=_describe_speculation(vllm_config.speculative_config),
        uses_model_runner_v2=vllm_config.use_v2_model_runner,
        uses_microbatches=parallel.use_ubatching,
        uses_elastic_ep=parallel.enable_elastic_ep,
        uses_fault_tolerance=parallel.enable_fault_tolerance,
        uses_sleep_mode=model.enable_sleep_mode,
        uses_offloading=vllm_config.cache_config.kv_offloading_size is not None,
        has_mixed_cache_types=bool(vllm_config.cache_config.kv_cache_dtype_skip_layers),
        uses_hisparse=vllm_config.attention_config.hisparse_config is not None,
        kv_cache_layout=envs.VLLM_KV_CACHE_LAYOUT,
    )


def _has_compressed_layers(text_config: Any) -> bool:
    # Layers that keep different amounts of history live in several cache groups, as in hybrid models.
    return bool(getattr(text_config, "compress_ratios", None))


def _cache_update_splits_graph(compilation: CompilationConfig) -> bool:
    if compilation.pass_config.fuse_rope_kvcache_cat_mla:
        return False
    if compilation.splitting_ops is not None:
        return CACHE_UPDATE_OP in compilation.splitting_ops
    # Not decided yet: vLLM adds the op to its default list later, except in these two cases.
    return not compilation.use_inductor_graph_partition and not compilation.pass_config.fuse_attn_quant


def _describe_speculation(speculative_config: Any) -> Speculation | None:
    if speculative_config is None:
        return None
    return Speculation(
        method=str(speculative_config.method),
        num_tokens_varies=bool(speculative_config.num_speculative_tokens_per_batch_size),
        uses_adaptive_verification=bool(speculative_config.enable_adaptive_verification),
    )
