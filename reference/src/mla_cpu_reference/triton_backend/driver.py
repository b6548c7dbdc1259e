"""The driver: it says that there is a CPU, and has nothing to launch kernels with."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

WITHOUT_COMPILER = "the Triton backend `cpu` of mla_cpu_reference only interprets; set TRITON_INTERPRET=1"


class InterpreterDriver(DriverBase):
    """One CPU, always there."""

    @classmethod
    def is_active(cls) -> bool:
        """Whether this machine has the device: it does."""
        return True

    def get_current_target(self) -> GPUTarget:
        """What kernels would be compiled for."""
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> torch.device:
        """Where kernels find their tensors."""
        return torch.device("cpu")

    def get_current_device(self) -> int:
        """Refuse: the first thing that Triton asks for when it compiles a kernel to launch."""
        raise RuntimeError(WITHOUT_COMPILER)

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Refuse: a launcher would ask."""
        raise RuntimeError(f"{WITHOUT_COMPILER} (asked for the C++ type of {ty})")

    def get_benchmarker(self) -> Any:
        """Refuse: an interpreted kernel's time says nothing."""
        raise RuntimeError(f"{WITHOUT_COMPILER}, and fix the configuration of autotuned kernels")
