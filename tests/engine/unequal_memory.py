"""A vLLM plugin for tests: the second worker finds half of the memory that the first one finds."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


def register() -> None:
    original = CPUWorker.determine_available_memory
    if hasattr(original, "__wrapped__"):
        return

    def determine_available_memory(self: Any) -> int:
        available_bytes = original(self)
        return available_bytes // 2 if self.rank == 1 else available_bytes

    determine_available_memory.__wrapped__ = original  # type: ignore[attr-defined]
    CPUWorker.determine_available_memory = determine_available_memory
