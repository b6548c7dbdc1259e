"""The features that are compared with KVPP on and off in one and the same way: how each engine is made."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import write_moe_checkpoint, write_mtp_checkpoint, write_sparse_checkpoint
from recall_runs import RECALL_ENGINE

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR

# Uneven stages, each with enough layers that every scratch buffer is used more than once.
STAGES = (7, 6)
SHARED_INDEXERS = ("full", "full", "full", "shared", "shared", "full", "shared", "shared")
METRICS = {"kind": "metrics"}
RECALL_VOCABULARY = 134
# What a worker is told to do wrong, one kind of cache at a time.
NOTHING_MOVED = ("sabotage_transfers", [])
INDEXERS_LOST = ("lose_components", "indexer")
LATENTS_LOST = ("lose_components", "attn.attn")
DRAFTS_FORGOTTEN = ("forget_drafts",)


def _recall(folder: Path) -> Path:
    return CHECKPOINT_DIR


@dataclass(frozen=True)
class FeatureCase:
    """One feature: the engine that has it, and the faults that must change its answers."""

    name: str
    write_checkpoint: Callable[[Path], Path] = _recall
    engine: Mapping[str, Any] = field(default_factory=dict)
    reference: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    plugin: str | None = None
    # Asked of the run without KVPP behind the workload.
    probes: tuple[str, ...] = ()
    faults: tuple[tuple[Any, ...], ...] = (NOTHING_MOVED,)
    # Whether the Hugging Face model of the checkpoint computes the same: without rounding of the cache or of weights.
    equals_hugging_face: bool = False
    has_drafts: bool = False
    proves: tuple[str, ...] = ()

    def make_workload(self) -> dict[str, Any]:
        return make_workload(RECALL_VOCABULARY) if self.write_checkpoint is _recall else make_workload()

    def make_engine(self, folder: Path) -> dict[str, Any]:
        return {
            **RECALL_ENGINE,
            "tensor_parallel_size": 2,
            "max_num_batched_tokens": 64,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            # Enough for the workload; whole layers are moved, so a larger pool only costs time.
            "kv_cache_memory_bytes": 32 * 1024 * 1024,
            "model": str(self.write_checkpoint(folder)),
            **self.engine,
        }


def make_workload(vocabulary_size: int = 512) -> dict[str, Any]:
    """Prompts up to twice as long as a chunk; the third repeats the first and goes on."""
    generator = random.Random(5)
    first, second = ([generator.randrange(10, 180) for _ in range(length)] for length in (100, 33))
    prompts = [[token % vocabulary_size for token in prompt] for prompt in (first, second, first[:90] + second)]
    requests = [{"prompt": prompt, "max_tokens": 8 + 2 * i, "arrives": 4 * i} for i, prompt in enumerate(prompts)]
    return {"kind": "serve", "name": "workload", "requests": requests}


def _piecewise(**changes: Any) -> dict[str, Any]:
    return {
        "enforce_eager": False,
        "compilation_config": {"mode": 3, "custom_ops": ["none"], **changes},
        "worker_extension_cls": "compile_probe.CompileProbe",
    }


COMPILE_PROBES = ("count_graphs", "describe_compilation")


def _speculate(num_tokens: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": num_tokens}}


COMPILE_AFRESH = {"VLLM_DISABLE_COMPILE_CACHE": "1"}
CASES = (
    FeatureCase(
        "pipeline parallel",
        lambda folder: write_mtp_checkpoint(folder, num_layers=sum(STAGES)),
        # Without drafts: with them vLLM's runner V1 does not start on the stages that make none.
        {"pipeline_parallel_size": 2},
        ("chunked_prefill", "pipeline_parallel"),
        {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, STAGES))},
        equals_hugging_face=True,
        proves=("pipeline parallelism",),
    ),
    FeatureCase(
        "expert parallel",
        lambda folder: write_moe_checkpoint(folder, num_layers=8, num_experts=8),
        {"enable_expert_parallel": True},
        ("chunked_prefill", "expert_parallel"),
        equals_hugging_face=True,
        proves=("expert parallelism",),
    ),
    FeatureCase(
        "mtp",
        lambda folder: write_mtp_checkpoint(folder, num_layers=6),
        _speculate(2),
        ("chunked_prefill",),
        faults=(NOTHING_MOVED, DRAFTS_FORGOTTEN),
        has_drafts=True,
        equals_hugging_face=True,
        proves=("MTP",),
    ),
    FeatureCase(
        "sparse",
        lambda folder: write_sparse_checkpoint(folder, num_layers=8),
        reference=("chunked_prefill", "sparse"),
        faults=(INDEXERS_LOST, LATENTS_LOST),
        proves=("sparse attention (SFA)",),
    ),
    FeatureCase(
        "sparse with shared indexers",
        lambda folder: write_sparse_checkpoint(folder, num_layers=8, indexer_types=SHARED_INDEXERS),
        reference=("chunked_prefill", "sparse"),
        faults=(INDEXERS_LOST, LATENTS_LOST),
        proves=("sparse attention, shared indexers",),
    ),
    FeatureCase(
        "fp8 cache",
        # Not the recall model: its keys are too much alike to survive the rounding.
        lambda folder: write_moe_checkpoint(folder, num_layers=8, num_experts=4),
        {"kv_cache_dtype": "fp8"},
        reference=("chunked_prefill", "fp8_cache"),
        proves=("fp8 cache",),
    ),
    FeatureCase(
        "piecewise, traced",
        engine=_piecewise(backend="eager"),
        reference=("chunked_prefill", "piecewise"),
        environment=COMPILE_AFRESH,
        probes=COMPILE_PROBES,
        equals_hugging_face=True,
        proves=("PIECEWISE, pieces as traced",),
    ),
    FeatureCase(
        "piecewise, inductor",
        engine=_piecewise(),
        reference=("chunked_prefill", "piecewise"),
        environment=COMPILE_AFRESH,
        probes=COMPILE_PROBES,
        equals_hugging_face=True,
        proves=("PIECEWISE, pieces by inductor",),
    ),
    FeatureCase(
        "unequal memory",
        engine={"max_model_len": -1, "kv_cache_memory_bytes": 16 * 1024 * 1024, "dtype": "bfloat16"},
        reference=("chunked_prefill",),
        plugin="unequal_memory",
        proves=("unequal free memory", "max_model_len -1", "bfloat16"),
    ),
)
