import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

BLOCK_SIZE = 16
MLA = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
)


@pytest.fixture
def make_specs():
    """Cache specs of a stage, as its runner would report them."""

    def make_specs(num_layers=6, *, indexers=()):
        specs = {f"model.layers.{number}.attn": MLA for number in range(num_layers)}
        return specs | {f"model.layers.{number}.indexer": INDEXER for number in indexers}

    return make_specs
