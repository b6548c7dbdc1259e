"""A worker extension that sets the scale of an fp8 cache, or keeps the same rounded values in a plain one."""

from typing import Any

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from worker_extension import ProbeExtension


def round_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """To the nearest number with 3 bits after the leading one, at most 448, by arithmetic; ties to even."""
    exponents = values.abs().clamp(min=2**-9).log2().floor().clamp(min=-6)
    steps = 2.0 ** (exponents - 3)
    return ((values / steps).round() * steps).clamp(-448, 448)


class Fp8Probe(ProbeExtension):
    """The usual methods, and two for runs that are compared."""

    def set_key_scale(self, scale: float) -> None:
        """Let every layer store its keys in multiples of `scale`, as a checkpoint with scales would."""
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        for layer in layers.values():
            # Experts stand there too.
            if hasattr(layer, "kv_cache"):
                layer._k_scale.fill_(scale)

    def round_writes(self, scale: float) -> None:
        """Store in a plain cache what an fp8 cache with `scale` would give back."""
        original = getattr(CPUMLAImpl.do_kv_cache_update, "original", CPUMLAImpl.do_kv_cache_update)

        def do_kv_cache_update(impl: Any, kv_c: Any, k_pe: Any, *args: Any) -> None:
            original(impl, round_to_fp8(kv_c / scale) * scale, round_to_fp8(k_pe / scale) * scale, *args)

        do_kv_cache_update.original = original  # type: ignore[attr-defined]
        CPUMLAImpl.do_kv_cache_update = do_kv_cache_update
