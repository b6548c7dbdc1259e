"""Sparse MLA with the lightning indexer on CPU, for models where all or only some layers own an indexer."""

from functools import wraps
from typing import Any

from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2
from vllm.platforms.cpu import CpuPlatform

from mla_cpu_reference.sparse_attention import SparseMLABackend
from mla_cpu_reference.sparse_indexer import IndexerBackend, indexer_forward, quantise


def apply() -> None:
    """Give the platform a sparse backend, and the indexer a forward, a metadata builder and a quantiser."""
    original = CpuPlatform.get_attn_backend_cls.__func__

    @wraps(original)
    def get_attn_backend_cls(cls: Any, selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if attn_selector_config.use_sparse:
            return f"{SparseMLABackend.__module__}.{SparseMLABackend.__qualname__}"
        return str(original(cls, selected, attn_selector_config, num_heads))

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    SparseAttnIndexer.forward_cpu = indexer_forward
    deepseek_v2.DeepseekV32IndexerCache.get_attn_backend = lambda _: IndexerBackend
    # vLLM's own needs Triton where there is no device.
    deepseek_v2.per_token_group_quant_fp8 = _quantise_query


def _quantise_query(x: Any, group_size: int, *, column_major_scales: bool, use_ue8m0: bool) -> tuple[Any, Any]:
    if column_major_scales or not use_ue8m0:
        raise NotImplementedError("the CPU reference quantises queries with row-major scales that are powers of two")
    return quantise(x, group_size)
