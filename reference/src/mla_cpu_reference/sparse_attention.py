"""The sparse MLA backend: each token attends to the tokens that the last indexer before it has chosen."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

# Bounds the gathered rows, `[tokens, topk, head_size]` in float32, to 300 MB at 2048 chosen tokens.
TOKENS_AT_ONCE = 64


@dataclass
class SparseMetadata(AttentionMetadata):
    """What both caches of a layer need to know of a batch.

    The first `num_decode_tokens` go through `forward_mqa`; here that is all of them, in any mix of prefill and decode.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    token_requests: torch.Tensor  # [num_query_tokens], rows of block_table
    token_positions: torch.Tensor  # [num_query_tokens]
    block_table: torch.Tensor  # [num_requests, max_blocks]
    slot_mapping: torch.Tensor  # [at least num_query_tokens], -1 where nothing is to be written
    num_prefills: int = 0
    prefill: None = None
    decode: None = None

    @property
    def num_query_tokens(self) -> int:
        """Tokens that belong to a request; a padded batch has more rows."""
        return len(self.token_positions)


class SparseMetadataBuilder(AttentionMetadataBuilder[SparseMetadata]):
    """Builds from the common metadata alone, which both model runners give."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMetadata:  # noqa: ARG002 (vLLM's signature)
        """Say of each token which request it belongs to and at which position it stands."""
        common = common_attn_metadata
        starts = common.query_start_loc[: common.num_reqs + 1].long()
        lengths = starts.diff()
        token_requests = torch.repeat_interleave(torch.arange(common.num_reqs), lengths)
        # A request's query is the end of its sequence.
        first_positions = common.seq_lens[: common.num_reqs].long() - lengths
        places_in_query = torch.arange(len(token_requests)) - starts[:-1][token_requests]
        return SparseMetadata(
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            token_requests=token_requests,
            token_positions=first_positions[token_requests] + places_in_query,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class SparseMLABackend(MLACommonBackend):
    """Descriptor of the backend."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]

    @staticmethod
    def get_name() -> str:
        """Return the name in logs."""
        return "CPU_REFERENCE_SPARSE_MLA"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return no limit: plain torch has none."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:  # noqa: ARG004 (vLLM's signature)
        """Return the sizes that a block may be divided into."""
        return [MultipleOf(16)]

    @classmethod
    def is_sparse(cls) -> bool:
        """Return true."""
        return True

    @staticmethod
    def get_impl_cls() -> type["SparseMLAImpl"]:
        """Return the implementation."""
        return SparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        """Return the builder, which is the indexer's too."""
        return SparseMetadataBuilder


class SparseMLAImpl(CPUMLAImpl):
    """Attention over chosen rows; writes its cache as the dense CPU backend does."""

    is_sparse = True
    supports_dense_mha_prefill = False
    # The head count is the query's.
    kvpp_attends_all_heads = True

    def __init__(self, *args: Any, topk_indices_buffer: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # One buffer for all layers: where a layer owns no indexer, it still holds what the last one has chosen.
        self.topk_indices_buffer = topk_indices_buffer

    def record_logical_topk_ready(self) -> None:
        """Do nothing: there are no streams to order."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, ...],
        cache: torch.Tensor,
        metadata: SparseMetadata,
        layer: object,  # noqa: ARG002 (vLLM's signature)
    ) -> tuple[torch.Tensor, None]:
        """Attend, in float32; returns `[num_tokens, num_heads, kv_lora_rank]` and no log-sum-exp."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        output = query.new_zeros(*query.shape[:-1], self.kv_lora_rank)
        chosen = self.topk_indices_buffer[: metadata.num_query_tokens].long()
        for start in range(0, metadata.num_query_tokens, TOKENS_AT_ONCE):
            tokens = slice(start, min(start + TOKENS_AT_ONCE, metadata.num_query_tokens))
            block_tables = metadata.block_table[metadata.token_requests[tokens]]
            output[tokens] = self._attend(query[tokens], cache, block_tables, chosen[tokens]).to(query.dtype)
        return output, None

    def _attend(
        self, query: torch.Tensor, cache: torch.Tensor, block_tables: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        is_chosen = chosen >= 0
        rows = gather_rows(cache, block_tables, chosen.clamp(min=0)).float()
        scores = torch.einsum("thd,tkd->thk", query.float(), rows) * self.scale
        shares = scores.masked_fill(~is_chosen[:, None], float("-inf")).softmax(dim=-1)
        # A token for which nothing is chosen exists in dummy runs only; its shares are no numbers.
        shares = shares.masked_fill(~is_chosen[:, None], 0)
        return torch.einsum("thk,tkd->thd", shares, rows[..., : self.kv_lora_rank])


def gather_rows(cache: torch.Tensor, block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Read `cache`, `[num_blocks, block_size, width]`, at `positions`, `[n, k]`, of the sequences of `block_tables`."""
    block_size = cache.shape[1]
    blocks = block_tables.long().gather(1, positions // block_size)
    return cache[blocks, positions % block_size]
