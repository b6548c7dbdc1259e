"""The compiler that Triton wants beside a driver: it refuses to compile."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

from mla_cpu_reference.triton_backend.driver import WITHOUT_COMPILER


class InterpreterBackend(BaseBackend):
    """A compiler without stages."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Whether `target` is ours."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """The name under which compiled kernels would be kept."""
        return "mla-cpu-reference-interpreter"

    def parse_options(self, *_: Any) -> Any:
        """Refuse: there is no compiler."""
        raise RuntimeError(WITHOUT_COMPILER)

    def add_stages(self, *_: Any) -> None:
        """Refuse: there is no compiler."""
        raise RuntimeError(WITHOUT_COMPILER)

    def load_dialects(self, *_: Any) -> None:
        """Refuse: there is no compiler."""
        raise RuntimeError(WITHOUT_COMPILER)

    def get_module_map(self) -> dict[str, ModuleType]:
        """Refuse: there is no compiler."""
        raise RuntimeError(WITHOUT_COMPILER)
