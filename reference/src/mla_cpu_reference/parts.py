"""The parts by name: what each gives the CPU platform, why vLLM lacks it, and when the part can go."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

ENVIRONMENT_VARIABLE = "MLA_CPU_REFERENCE"
VLLM_VERSIONS = ("0.32.0",)


@dataclass(frozen=True)
class Part:
    """One part; the module of its name has a function `apply` that changes vLLM in this process."""

    name: str
    provides: str
    because: str
    removable_when: str

    def apply(self) -> None:
        """Change vLLM in this process."""
        import_module(f"mla_cpu_reference.{self.name}").apply()


PARTS: tuple[Part, ...] = (
    Part(
        name="chunked_prefill",
        provides="chunked prefill and prefix caching for MLA",
        because="CpuPlatform.check_and_update_config turns both off for MLA, though CPU_MLA can do both.",
        removable_when="The CPU platform leaves the settings as they are (not in 0.33.0).",
    ),
    Part(
        name="sparse",
        provides="sparse MLA with the lightning indexer",
        because="CpuPlatform.get_attn_backend_cls refuses it; SparseAttnIndexer.forward_cpu serves DeepSeek-V4 only.",
        removable_when="The CPU platform has a sparse MLA backend and an indexer that writes its keys (not in 0.33.0).",
    ),
    Part(
        name="pipeline_parallel",
        provides="pipeline parallelism",
        because="Only a dummy run allocates what a later stage receives, and CPUWorker skips it when running eagerly.",
        removable_when="CPUModelRunner allocates `intermediate_tensors` without a dummy run (not in 0.33.0).",
    ),
    Part(
        name="expert_parallel",
        provides="expert parallelism for unquantised experts",
        because="CPUUnquantizedExperts.apply ignores `expert_map`: its kernel reads beyond the rank's own experts.",
        removable_when="CPUUnquantizedExperts.apply uses `expert_map` (not in 0.33.0).",
    ),
    Part(
        name="data_parallel",
        provides="data parallelism with expert parallelism",
        because="CpuCommunicator has no `all_gatherv` and `reduce_scatterv`, which its all-to-all manager calls.",
        removable_when="CpuCommunicator has both (not in 0.33.0).",
    ),
    Part(
        name="piecewise",
        provides="compilation in pieces, cut at the cache update and attention",
        because="CpuPlatform.check_and_update_config replaces mode VLLM_COMPILE by DYNAMO_TRACE_ONCE.",
        removable_when="The CPU platform keeps VLLM_COMPILE (not in 0.33.0).",
    ),
    Part(
        name="fp8_cache",
        provides="kv_cache_dtype fp8 (e4m3, one scale a layer) for MLA",
        because="CPU_MLA stores fp8 as truncated integers, and its kernel and context gather cannot read fp8.",
        removable_when="CPU_MLA writes and reads fp8 (0.33.0 refuses the setting instead).",
    ),
    Part(
        name="runner_v2",
        provides="model runner V2, by Triton's interpreter",
        because="Its kernels are Triton's, and the CPU build comes without a Triton that runs on CPU.",
        removable_when="Triton for CPU can be installed beside the CPU build from the package index (not with 0.33.0).",
    ),
)


class UnknownPartError(ValueError):
    """A name in the environment variable is no part's."""


def selected_parts(text: str | None = None) -> tuple[Part, ...]:
    """The parts named in `text`, by default in the environment variable, separated by commas; in the order of `PARTS`.

    Raises:
        UnknownPartError: with the unknown names and the known ones.
    """
    if text is None:
        text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    names = {name.strip() for name in text.split(",")} - {""}
    if unknown := sorted(names - {part.name for part in PARTS}):
        raise UnknownPartError(
            f"{ENVIRONMENT_VARIABLE} names {', '.join(unknown)}; the parts are {', '.join(p.name for p in PARTS)}"
        )
    return tuple(part for part in PARTS if part.name in names)


def describe_table(parts: Sequence[Part] = PARTS) -> str:
    """The table of the README, as Markdown."""
    rows = [f"| `{part.name}` | {part.provides} | {part.because} | {part.removable_when} |" for part in parts]
    return "\n".join(("| Part | Provides | Because | Removable when |", "|---|---|---|---|", *rows))
