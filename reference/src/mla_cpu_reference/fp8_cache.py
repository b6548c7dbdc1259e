"""An fp8 KV cache for CPU_MLA: quantised when written, restored (the blocks in use, as a copy) before each read."""

from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

CACHE_DTYPES = ("fp8", "fp8_e4m3")
FP8 = torch.float8_e4m3fn


def quantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The bytes that stand for `values`, rounded to the nearest fp8 multiple of the one `scale`.

    Values beyond the largest that fp8 can hold become that one, as on devices: a plain cast would make them NaN.
    """
    limit = torch.finfo(FP8).max
    return (values.float() / _one_scale(scale)).clamp(-limit, limit).to(FP8).view(torch.uint8)


def restore_blocks(
    cache: torch.Tensor, block_table: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the blocks that `block_table` `[requests, blocks]` names out of a cache `[num_blocks, block_size, width]`.

    Returns the copy in `dtype`, and the table renumbered for it.
    """
    block_ids, renumbered = torch.unique(block_table.long(), return_inverse=True)
    # As bytes: indexing has no fp8 version.
    blocks = cache.view(torch.uint8)[block_ids].view(FP8)
    return (blocks.float() * _one_scale(scale)).to(dtype), renumbered.to(block_table.dtype)


def _one_scale(scale: torch.Tensor) -> float:
    if scale.numel() != 1:
        raise ValueError(f"an fp8 cache on CPU has one scale for all keys of a layer; found {scale.numel()}")
    return float(scale)


def apply() -> None:
    """Make CPU_MLA write and read fp8, and refuse the other quantised forms, which it would truncate."""
    CPUMLABackend.supported_kv_cache_dtypes = [*CPUMLABackend.supported_kv_cache_dtypes, *CACHE_DTYPES]
    _refuse_other_forms()
    _quantize_writes()
    _restore_for_decode()
    _restore_for_prefill_context()


def _refuse_other_forms() -> None:
    original = CPUMLAImpl.__init__

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if is_quantized_kv_cache(self.kv_cache_dtype) and self.kv_cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype}; CPU_MLA with the part fp8_cache keeps auto, "
                f"{' or '.join(CACHE_DTYPES)}"
            )

    CPUMLAImpl.__init__ = __init__


def _quantize_writes() -> None:
    original = CPUMLAImpl.do_kv_cache_update

    @wraps(original)
    def do_kv_cache_update(
        self: Any, kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, k_scale: Any
    ) -> None:
        if kv_cache_dtype in CACHE_DTYPES:
            kv_c, k_pe, kv_cache = quantize(kv_c, k_scale), quantize(k_pe, k_scale), kv_cache.view(torch.uint8)
        original(self, kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)

    CPUMLAImpl.do_kv_cache_update = do_kv_cache_update


def _restore_for_decode() -> None:
    original = CPUMLAImpl.forward_mqa

    @wraps(original)
    def forward_mqa(self: Any, q: Any, kv_cache: Any, attn_metadata: Any, layer: Any) -> Any:
        if self.kv_cache_dtype in CACHE_DTYPES:
            dtype = q[0].dtype if isinstance(q, tuple) else q.dtype
            decode = attn_metadata.decode
            kv_cache, block_table = restore_blocks(kv_cache, decode.block_table, layer._k_scale, dtype)
            attn_metadata = replace(attn_metadata, decode=replace(decode, block_table=block_table))
        return original(self, q, kv_cache, attn_metadata, layer)

    CPUMLAImpl.forward_mqa = forward_mqa


def _restore_for_prefill_context() -> None:
    original = CPUMLAImpl._compute_prefill_context

    @wraps(original)
    def _compute_prefill_context(self: Any, q: Any, kv_cache: Any, attn_metadata: Any, k_scale: Any) -> Any:
        if self.kv_cache_dtype not in CACHE_DTYPES:
            return original(self, q, kv_cache, attn_metadata, k_scale)
        prefill = attn_metadata.prefill
        workspace_dtype = prefill.chunked_context.workspace.dtype
        kv_cache, block_table = restore_blocks(kv_cache, prefill.block_table, k_scale, workspace_dtype)
        attn_metadata = replace(attn_metadata, prefill=replace(prefill, block_table=block_table))
        # The original asserts a plain cache by this name, and it now gets one.
        kept, self.kv_cache_dtype = self.kv_cache_dtype, "auto"
        try:
            return original(self, q, kv_cache, attn_metadata, k_scale)
        finally:
            self.kv_cache_dtype = kept

    CPUMLAImpl._compute_prefill_context = _compute_prefill_context
