"""A worker extension that counts the compiled pieces of a model."""

from dataclasses import asdict
from typing import Any

from vllm.compilation.counter import compilation_counter
from worker_extension import ProbeExtension


class CompileProbe(ProbeExtension):
    """The usual methods, and vLLM's own count of graphs."""

    def count_graphs(self) -> dict[str, int]:
        """How many graphs vLLM has seen, cut and compiled in this worker."""
        return asdict(compilation_counter)

    def describe_compilation(self) -> dict[str, Any]:
        """The settings of this worker that decide how its model is compiled."""
        compilation = self.vllm_config.compilation_config  # type: ignore[attr-defined]
        return {"mode": compilation.mode.name, "backend": compilation.backend}
