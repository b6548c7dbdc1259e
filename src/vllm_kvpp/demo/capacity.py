"""What the KV cache should hold, by the plan and by the formula, to hold against what vLLM reports."""

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_kvpp.plan import NUM_SCRATCH_BUFFERS, LayerCache, fit_num_blocks, plan_cache, plan_tail


@dataclass(frozen=True)
class ModelShape:
    """The numbers of an MLA model that its cache depends on, and its heads, by which tensor parallelism splits it."""

    num_layers: int
    num_heads: int
    latent_dim: int


@dataclass(frozen=True)
class ExpectedCapacity:
    """Blocks without and with KVPP in the same memory, and the factor of the formula, which knows no rounding."""

    num_blocks_off: int
    num_blocks_on: int
    formula_factor: float


def read_shape(config_path: Path) -> ModelShape:
    """Read a checkpoint's config.json."""
    config = json.loads(config_path.read_text())
    return ModelShape(
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        latent_dim=config["kv_lora_rank"] + config["qk_rope_head_dim"],
    )


def expect_capacity(
    shape: ModelShape, *, tp_size: int, kv_cache_bytes: int, block_size: int, dtype_bytes: int
) -> ExpectedCapacity:
    """Plan the cache as every rank does, and take the rank with the fewest blocks, as the engine does."""
    page_size_bytes = block_size * shape.latent_dim * dtype_bytes
    caches = [
        LayerCache(f"model.layers.{number}.self_attn.attn", page_size_bytes) for number in range(shape.num_layers)
    ]
    plan = plan_cache(caches, group_size=tp_size)
    # The ranks of one machine share memory, so decode reads in place and needs none for queries.
    tail_bytes = min(
        plan_tail(plan, rank, kv_cache_bytes, transfer="auto", shares_memory=True) for rank in range(tp_size)
    )
    most_owned_layers = -(-shape.num_layers // tp_size)
    return ExpectedCapacity(
        num_blocks_off=kv_cache_bytes // plan.full_bytes_per_block,
        num_blocks_on=min(fit_num_blocks(plan, rank, kv_cache_bytes, tail_bytes) for rank in range(tp_size)),
        formula_factor=shape.num_layers / (most_owned_layers + NUM_SCRATCH_BUFFERS),
    )
