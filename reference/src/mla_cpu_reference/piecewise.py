"""Piecewise compilation on CPU: the model cut at every cache update and attention, the pieces between them compiled.

All that a user has to say, with `enforce_eager` false, is one of

    compilation_config={"mode": 3, "custom_ops": ["none"]}                                     the pieces by inductor
    compilation_config={"mode": 3, "custom_ops": ["none"], "backend": "eager"}                 the pieces as traced

`custom_ops` without the rotary embedding, because the CPU kernel of that is wrong for MLA's queries; `["all",
"-rotary_embedding"]` does it too. `splitting_ops` may be left out: vLLM's own list has the cache update and attention.
A `cudagraph_mode` may be given and is dropped, since there are no graphs to record on CPU.
"""

from functools import wraps
from typing import Any

from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationMode
from vllm.platforms.cpu import CpuPlatform

# vLLM turns some on by default, and imports their code on devices only.
DEVICE_FUSIONS = (
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_attn_quant",
    "fuse_allreduce_rms",
    "enable_qk_norm_rope_fusion",
    "fuse_rope_kvcache_cat_mla",
    "fuse_act_padding",
    "fuse_mla_dual_rms_norm",
    "fuse_rope_kvcache",
    "fuse_qk_norm_rope_kvcache",
)


def apply() -> None:
    """Keep mode VLLM_COMPILE as the user gave it, and leave out what needs a device."""
    original = CpuPlatform.check_and_update_config.__func__

    @wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        mode, backend = compilation.mode, compilation.backend
        original(cls, vllm_config)
        # Any other mode now is one that the platform had a reason for.
        if mode == CompilationMode.VLLM_COMPILE and compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE:
            compilation.mode, compilation.backend = mode, backend
            _leave_out_devices(compilation)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    # It names operators that only device builds have. Without it inductor copies what such an operator changes.
    FixFunctionalizationPass.__call__ = _change_nothing


def _leave_out_devices(compilation: Any) -> None:
    for name in DEVICE_FUSIONS:
        setattr(compilation.pass_config, name, False)
    if compilation.compile_sizes is None:
        # On devices the sizes of recorded graphs stand here; None fails at the first batch.
        compilation.compile_sizes = []


def _change_nothing(self: Any, graph: Any) -> None:
    pass
