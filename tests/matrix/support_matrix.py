"""The rows of docs/support-matrix.md. A row is proven by the tests that carry its name, and by nothing else.

A test says `@pytest.mark.proves("chunked prefill")`. A row that names how it is run (`ENGINE`) must be carried by an
engine test; one that is not run here says why, and must be carried by a contract test.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENGINE = "engine"
CAPACITY = "engine, capacity"
NOT_RUN = "not run here"


@dataclass(frozen=True)
class Feature:
    """One row: what it is, how it is proven, and what there is to say about it."""

    name: str
    proof: str
    says: str


FEATURES: tuple[Feature, ...] = (
    Feature("TP 2", ENGINE, "8 layers; every other row builds on it"),
    Feature("TP 4", ENGINE, "with sums that are equal on all ranks, see decision 0007"),
    Feature("TP 8", CAPACITY, "61 layers"),
    Feature("pipeline parallelism", ENGINE, "PP 2 × TP 2, stages of 7 and 6 layers"),
    Feature("expert parallelism", ENGINE, "TP 2, 8 experts"),
    Feature("data parallelism", ENGINE, "DP 2 × TP 2 with experts, one replica idle"),
    Feature("chunked prefill", ENGINE, "chunks of 16, 40 and 99 tokens"),
    Feature("prefix caching", ENGINE, "hits, a partial last block, eviction and reuse of blocks"),
    Feature("mixed batches", ENGINE, "prefills that join decodes"),
    Feature("preemption and resumption", ENGINE, "a pool of 40 blocks"),
    Feature("aborts", ENGINE, "in a prefill, in a decode"),
    Feature("many requests at once", ENGINE, "1, 2, 3, 8 and 32"),
    Feature("MTP", ENGINE, "2 tokens a step; as many accepted as without KVPP"),
    Feature("sparse attention (SFA)", ENGINE, "as DeepSeek-V3.2: every layer owns an indexer; eager"),
    Feature("sparse attention, shared indexers", ENGINE, "as GLM-5.2: some layers reuse the last choice; eager"),
    Feature("fp8 cache", ENGINE, "e4m3, one scale a layer"),
    Feature("bfloat16", ENGINE, "model and cache"),
    Feature("PIECEWISE, pieces as traced", ENGINE, "compiled in pieces, no graphs recorded on CPU"),
    Feature("PIECEWISE, pieces by inductor", ENGINE, "compiled in pieces, no graphs recorded on CPU"),
    Feature("model runner V1", ENGINE, "every other row but V2's"),
    Feature("model runner V2", ENGINE, "by Triton's interpreter"),
    Feature("`kvpp.transfer` auto, active, full", ENGINE, "exactly the history's blocks, or every block"),
    Feature("`kvpp.decode` in_place, auto", ENGINE, "equal to the bit, and nothing moved in decode"),
    Feature("`kvpp.decode` owner, transfer", ENGINE, "equal to the bit; at the owner no history moved in decode"),
    Feature("transfers through shared memory", ENGINE, "every row but the next"),
    Feature("transfers by broadcast", ENGINE, "gloo, through staging memory; queries by gather and scatter"),
    Feature("num_gpu_blocks_override", ENGINE, "below what fits; above is refused"),
    Feature("max_model_len -1", ENGINE, "vLLM fits the length to KVPP's blocks"),
    Feature("unequal free memory", ENGINE, "one rank has half; all take the smaller count"),
    Feature("the `LLM` class", ENGINE, "every row but the next"),
    Feature("`vllm serve`", ENGINE, "the demo, over the OpenAI API"),
    Feature("asynchronous scheduling", NOT_RUN, "needs a device: vLLM turns it off on CPU"),
    Feature("PIECEWISE graphs on a device", NOT_RUN, "needs CUDA graphs"),
    Feature("prefill context parallelism (PCP)", NOT_RUN, "needs a device; with runner V2 only, and with a warning"),
    Feature("Ray", NOT_RUN, "needs several machines, or Ray on one"),
    Feature("NCCL, HCCL and other devices", NOT_RUN, "needs a device; streams are tested on recorded calls"),
    Feature(
        "`dspark` drafts", NOT_RUN, "no draft of vLLM 0.32 or 0.33 fits: all have other caches, or a hybrid target"
    ),
    Feature("`fp8_ds_mla` caches", NOT_RUN, "needs kernels of a device; placed by vLLM's own allocator"),
    Feature("LI-C8 and SFA-C8 layouts", NOT_RUN, "stock vLLM has none; as component layouts in the plan"),
)


def describe_table(proofs: Mapping[str, Sequence[str]], features: Sequence[Feature] = FEATURES) -> str:
    """The table of docs/support-matrix.md, as Markdown; `proofs` maps rows to the tests that carry their names."""
    rows = [
        f"| {feature.name} | {feature.proof} | {feature.says} | {_list(proofs[feature.name])} |" for feature in features
    ]
    return "\n".join(("| Feature | Proof | | Tests |", "|---|---|---|---|", *rows))


def _list(tests: Sequence[str]) -> str:
    return "<br>".join(f"`{test}`" for test in sorted(set(tests)))
