"""Random sequences, run in steps through the paged reference, and one token at a time without it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from mla_cpu_reference.sparse_attention import SparseMetadata, SparseMetadataBuilder, SparseMLAImpl
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 16, 40, 8
INDEX_HEADS, INDEX_DIM = 2, 128
HEADS, RANK, ROPE = 3, 512, 64
TOPK = 12
SCALE = 0.05
NAME = "indexer.k_cache"

Part = tuple[int, int, int]
"""A request, and the half-open range of its positions that a step computes."""


@dataclass
class RandomSequence:
    """What a model would compute for each token of a sequence."""

    length: int
    seed: int
    index_weights: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(self.length, *shape, generator=generator)

        self.index_query = draw(INDEX_HEADS, INDEX_DIM).to(torch.float8_e4m3fn)
        self.index_keys = draw(INDEX_DIM) * 3
        self.index_weights = draw(INDEX_HEADS)
        self.query = draw(HEADS, RANK + ROPE)
        self.latents = draw(RANK + ROPE)


@dataclass
class PagedRun:
    """The two caches of a layer, in scattered blocks, and the buffer that holds the last choice."""

    sequences: Sequence[RandomSequence]
    buffer: torch.Tensor = field(default_factory=lambda: torch.full((256, TOPK), -7, dtype=torch.int32))

    def __post_init__(self) -> None:
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
        self.block_tables = order[: len(self.sequences) * MAX_BLOCKS].view(-1, MAX_BLOCKS).int()
        self.index_cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, INDEX_DIM + 4, dtype=torch.uint8)
        self.cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, RANK + ROPE), float("nan"))
        self.indexer = make_indexer(self.index_cache, self.buffer)
        self.attention = SparseMLAImpl(
            *(HEADS, RANK + ROPE, SCALE, 1, None, None, "auto", None, AttentionType.DECODER, None),
            topk_indices_buffer=self.buffer,
            q_lora_rank=None,
            kv_lora_rank=RANK,
            qk_nope_head_dim=1,
            qk_rope_head_dim=ROPE,
            qk_head_dim=1 + ROPE,
            v_head_dim=1,
            kv_b_proj=None,
        )

    def step(self, parts: Sequence[Part], *, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the parts in one batch; returns each token's choice and its attention's output."""
        metadata = self.metadata(parts, padding=padding)

        def batch(name: str) -> torch.Tensor:
            rows = torch.cat([getattr(self.sequences[request], name)[start:end] for request, start, end in parts])
            return torch.cat((rows, rows.new_zeros(padding, *rows.shape[1:])))

        latents = batch("latents")
        with override_forward_context(SimpleNamespace(attn_metadata={NAME: metadata})):
            self.indexer(latents, batch("index_query"), batch("index_keys"), batch("index_weights"))
        self.attention.do_kv_cache_update(
            latents[:, :RANK], latents[:, None, RANK:], self.cache, metadata.slot_mapping, "auto", torch.ones(1)
        )
        output, _ = self.attention.forward_mqa(batch("query"), self.cache, metadata, SimpleNamespace())
        return self.buffer[: len(latents)].clone(), output

    def metadata(self, parts: Sequence[Part], *, padding: int = 0) -> SparseMetadata:
        lengths = torch.tensor([end - start for _, start, end in parts])
        starts = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
        slots = [self._slot(request, position) for request, *span in parts for position in range(*span)]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([end for *_, end in parts], dtype=torch.int32),
            num_reqs=len(parts),
            num_actual_tokens=int(starts[-1]) + padding,
            max_query_len=int(lengths.max()),
            max_seq_len=BLOCK_SIZE * MAX_BLOCKS,
            block_table_tensor=self.block_tables[[request for request, *_ in parts]],
            slot_mapping=torch.tensor(slots + [-1] * padding),
        )
        builder: Any = SparseMetadataBuilder(None, [NAME], None, torch.device("cpu"))
        return builder.build(0, common)

    def _slot(self, request: int, position: int) -> int:
        return int(self.block_tables[request, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def make_indexer(cache: torch.Tensor, buffer: torch.Tensor, **changes: Any) -> SparseAttnIndexer:
    """The real module, over a cache of ours."""
    with set_current_vllm_config(VllmConfig()):
        settings = {
            "k_cache": SimpleNamespace(prefix=NAME, kv_cache=cache),
            "quant_block_size": INDEX_DIM,
            "scale_fmt": "ue8m0",
            "topk_tokens": TOPK,
            "head_dim": INDEX_DIM,
            "max_model_len": BLOCK_SIZE * MAX_BLOCKS,
            "max_total_seq_len": BLOCK_SIZE * MAX_BLOCKS,
            "topk_indices_buffer": buffer,
        }
        return SparseAttnIndexer(**{**settings, **changes})


def plain_choice(sequence: RandomSequence, position: int) -> list[int]:
    """What the token at `position` attends to, by a loop over the keys up to its own."""
    scores = []
    for earlier in range(position + 1):
        largest = sequence.index_keys[earlier].abs().max().item()
        scale = 1.0
        while largest > 448 * scale:
            scale *= 2
        while largest <= 448 * scale / 2:
            scale /= 2
        key = (sequence.index_keys[earlier] / scale).to(torch.float8_e4m3fn).double() * scale
        products = [float(query.double() @ key) for query in sequence.index_query[position]]
        weights = sequence.index_weights[position].double().tolist()
        scores.append(sum(max(product, 0.0) * weight for product, weight in zip(products, weights, strict=True)))
    return sorted(range(position + 1), key=lambda earlier: (-scores[earlier], earlier))[:TOPK]


def plain_attention(sequence: RandomSequence, position: int, chosen: Sequence[int]) -> torch.Tensor:
    """Softmax over the chosen tokens' latents, in float64: `[HEADS, RANK]`."""
    rows = sequence.latents[list(chosen)].double()
    shares = (sequence.query[position].double() @ rows.T * SCALE).softmax(dim=-1)
    return shares @ rows[:, :RANK]
