"""The lightning indexer: keys quantised to float8, scores of every earlier token, and the best of them."""

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from mla_cpu_reference.sparse_attention import SparseMetadata, SparseMetadataBuilder, gather_rows

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class IndexerBackend(AttentionBackend):
    """Descriptor of the indexer's cache, which no attention layer reads."""

    @staticmethod
    def get_name() -> str:
        """Return the name in logs."""
        return "CPU_REFERENCE_INDEXER"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:  # noqa: ARG004 (vLLM's signature)
        """Return the sizes that a block may be divided into."""
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> Any:
        """Refuse: the indexer is a module, not an attention implementation."""
        raise NotImplementedError("the indexer's cache has no attention implementation")

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        """Return the builder, which is the attention's too."""
        return SparseMetadataBuilder


def quantise(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension in groups, as vLLM's kernels do for scales of the format ue8m0.

    Returns the float8 values in the shape of `x`, and one float32 scale a group, a power of two.
    """
    groups = x.float().unflatten(-1, (-1, group_size))
    scales = (groups.abs().amax(dim=-1).clamp(min=1e-10) / FP8_MAX).log2().ceil().exp2()
    return (groups / scales[..., None]).flatten(-2).to(FP8), scales


def write_keys(cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, group_size: int) -> None:
    """Write `keys`, `[num_tokens, head_dim]`, to the bytes of `cache`, `[num_blocks, block_size, width]`.

    A token with a slot below 0 is not written. A row holds the float8 values, then the float32 scales.
    """
    is_written = slots >= 0
    values, scales = quantise(keys[is_written], group_size)
    slots = slots[is_written].long()
    rows = torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), dim=-1)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def read_keys(cache: torch.Tensor, block_table: torch.Tensor, length: int, head_dim: int) -> torch.Tensor:
    """Return the first `length` keys of one sequence, `[length, head_dim]`, in float64."""
    rows = gather_rows(cache, block_table[None], torch.arange(length)[None])[0]
    values = rows[:, :head_dim].contiguous().view(FP8).double()
    scales = rows[:, head_dim:].contiguous().view(torch.float32).double()
    return (values.unflatten(-1, (scales.shape[1], -1)) * scales[..., None]).flatten(-2)


def choose_tokens(
    query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, topk: int
) -> torch.Tensor:
    """Choose the tokens that each query attends to.

    Args:
        query: `[num_queries, num_heads, head_dim]`, in float8; its scales are part of `weights`.
        keys: `[length, head_dim]`, in float64.
        weights: `[num_queries, num_heads]`.
        positions: `[num_queries]`; a query sees the keys up to its own.
        topk: how many to choose at most.

    Returns:
        `[num_queries, topk]`, best first; of equal ones the earlier first; -1 where there are no more.
    """
    # Products of float8 values sum exactly in float64, whatever the order: equal choices for equal bits.
    scores = torch.einsum("qhd,kd->qhk", query.double(), keys).relu()
    scores = torch.einsum("qhk,qh->qk", scores, weights.double())
    is_visible = torch.arange(len(keys)) <= positions[:, None]
    # Stable, because scores tie: where no head's product is positive, the sum is exactly 0.
    order = scores.masked_fill(~is_visible, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    chosen = torch.full((len(query), topk), -1)
    chosen[:, : order.shape[1]] = order.masked_fill(~is_visible.gather(1, order), -1)
    return chosen


def indexer_forward(
    self: Any, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Write the batch's keys, then choose for each of its tokens; `SparseAttnIndexer.forward_cpu`."""
    _check_supported(self)
    metadata = _layer_metadata(self.k_cache.prefix)
    if metadata is None:  # a profile run
        return self.topk_indices_buffer
    cache, num_tokens = self.k_cache.kv_cache, metadata.num_query_tokens
    write_keys(cache, k[:num_tokens], metadata.slot_mapping[:num_tokens], self.quant_block_size)
    self.topk_indices_buffer[: len(hidden_states)] = -1
    for request in metadata.token_requests.unique().tolist():
        tokens = (metadata.token_requests == request).nonzero().flatten()
        positions = metadata.token_positions[tokens]
        keys = read_keys(cache, metadata.block_table[request], int(positions.max()) + 1, self.head_dim)
        chosen = choose_tokens(q_quant[tokens], keys, weights[tokens], positions, self.topk_tokens)
        self.topk_indices_buffer[tokens] = chosen.to(self.topk_indices_buffer.dtype)
    return self.topk_indices_buffer


def _layer_metadata(name: str) -> SparseMetadata | None:
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):  # with drafts: the first is the target's
        metadata = metadata[0]
    return metadata[name] if metadata is not None else None


def _check_supported(indexer: Any) -> None:
    features = {
        "use_fp4_cache": indexer.use_fp4_cache,
        "skip_k_cache_insert": indexer.skip_k_cache_insert,
        "compress_ratio": indexer.compress_ratio != 1,
        "candidate_blocks": indexer.candidate_blocks is not None,
        "decode_context_parallel_size": indexer.dcp_world_size > 1,
        "prefill_context_parallel_size": indexer.use_pcp,
    }
    if used := [name for name, is_used in features.items() if is_used]:
        raise NotImplementedError(f"the CPU reference of the sparse indexer lacks {', '.join(used)}; turn it off")
