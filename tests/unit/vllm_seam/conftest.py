from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
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


class Implementation:
    """An attention's implementation, which writes down its calls, and gives each head of a query its first numbers."""

    def __init__(self, log, *, is_sparse):
        self.log = log
        self.is_sparse = is_sparse

    def forward_mqa(self, q, kv_cache, metadata, layer):
        self.log.append((q, kv_cache, metadata, layer))
        return torch.cat(q, dim=-1)[..., :4] if isinstance(q, tuple) else q[..., :4], "log of sums"

    def do_kv_cache_update(self, *args, **kwargs):
        self.log.append(("update", args, kwargs))


class Attention(MLAAttention):
    """vLLM's layer, without what its constructor needs an engine for: two heads, queries 6 wide and outputs 4."""

    def __init__(self, *, backend="CPU_MLA", is_sparse=False, num_heads=2):
        torch.nn.Module.__init__(self)
        self.log = []
        self.impl = Implementation(self.log, is_sparse=is_sparse)
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self.num_heads = num_heads
        self.head_size = 6
        self.kv_lora_rank = 4

    def prepare_kv_cache_update(self, attn_metadata):
        """Nothing to prepare."""


class FusedAttention(Attention):
    """One with a forward of its own."""

    def forward(self, hidden_states):
        """Nothing to do."""


class Indexer(SparseAttnIndexer):
    """vLLM's indexer, which writes down its calls, and chooses 7 for every row."""

    def __init__(self, cache_name, *, num_choices=3, dtype=torch.int32):
        torch.nn.Module.__init__(self)
        self.k_cache = SimpleNamespace(prefix=cache_name)
        self.skip_k_cache_insert = False
        self.topk_indices_buffer = torch.zeros(8, num_choices, dtype=dtype)
        self.log = []

    def forward(self, *args, **kwargs):
        self.log.append((args, kwargs))
        self.topk_indices_buffer.fill_(7)
        return self.topk_indices_buffer


@pytest.fixture
def attention_class():
    return Attention


@pytest.fixture
def fused_attention_class():
    return FusedAttention


@pytest.fixture
def indexer_class():
    return Indexer


@pytest.fixture
def make_model():
    """A model of some layers as (modules by cache name, model); each has an attention, those of `indexers` more."""

    def make_model(num_layers=4, *, indexers=(), prefix="model.layers", dtype=torch.int32, **attention):
        model = torch.nn.Module()
        attentions = {
            f"{prefix}.{number}.attn": Attention(is_sparse=bool(indexers), **attention) for number in range(num_layers)
        }
        made = {f"{prefix}.{number}.indexer": number for number in indexers}
        model.indexers = torch.nn.ModuleList([Indexer(name, dtype=dtype) for name in made])
        caches = {indexer.k_cache.prefix: SimpleNamespace() for indexer in model.indexers}
        return attentions | caches, model

    return make_model
