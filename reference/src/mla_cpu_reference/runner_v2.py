"""Model runner V2 on CPU: its kernels are Triton's, and the Triton interpreter runs them."""

import os

import vllm.v1.sample.ops.topk_topp_sampler as sampler
from vllm.triton_utils import HAS_TRITON

ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


def apply() -> None:
    """Sample top-k and top-p in torch, since the interpreter cannot run that one kernel.

    Its loop over `tl.range` calls a method of the loop variable, which is a Python integer in the interpreter.

    Raises:
        RuntimeError: the process lacks the Triton backend or the environment that the part needs; `apply` is too late
            to give them.
    """
    lacking = [f"{name}={value}" for name, value in ENVIRONMENT.items() if os.environ.get(name) != value]
    if not HAS_TRITON:
        lacking.append("a folder on PYTHONPATH that mla_cpu_reference.triton_backend.write_backend has written to")
    if lacking:
        raise RuntimeError(f"the reference part runner_v2 needs, when the process starts: {'; '.join(lacking)}")
    sampler.HAS_TRITON = False
