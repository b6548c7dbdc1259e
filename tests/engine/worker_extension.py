"""Methods that tests call in the workers, through `--worker-extension-cls` and `collective_rpc`."""

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist


class _NothingMoved:
    num_bytes = 0

    def wait(self) -> None:
        pass


class _MovesNothing:
    """A transport that claims to have moved each bundle, except of the layers in `moved`, which it really moves."""

    def __init__(self, real: Any, moved: set[int], num_layers: int) -> None:
        self.real = real
        self._moved = moved
        self._num_layers = num_layers
        self._num_started = 0

    def start(self, memory: Any) -> Any:
        index, self._num_started = self._num_started, self._num_started + 1
        if index % self._num_layers in self._moved:
            return self.real.start(memory)
        return _NothingMoved()


class ProbeExtension:
    """Appended to the worker's bases by vLLM."""

    def sabotage_transfers(self, moved_layers: list[int]) -> None:
        """Stop moving every layer but these, by place in execution order."""
        transfers = self._kvpp.transfers  # type: ignore[attr-defined]
        real = getattr(transfers.transport, "real", transfers.transport)
        transfers.transport = _MovesNothing(real, set(moved_layers), transfers.num_layers)

    def restore_transfers(self) -> None:
        """Move every layer again."""
        transfers = self._kvpp.transfers  # type: ignore[attr-defined]
        transfers.transport = transfers.transport.real

    def digest_caches(self) -> dict[str, str]:
        """A fingerprint of each layer's cache, wherever it lies on this rank."""
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        return {
            name: hashlib.sha256(layer.kv_cache.contiguous().view(torch.uint8).numpy()).hexdigest()[:16]
            for name, layer in layers.items()
            if hasattr(layer, "kv_cache")
        }

    def describe_worker(self) -> dict[str, Any]:
        """What a worker is made of, and which of our modules it has loaded."""
        runner = self.model_runner  # type: ignore[attr-defined]
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        caches = [layer.kv_cache for layer in layers.values() if hasattr(layer, "kv_cache")]
        return {
            "class": type(self).__mro__[0].__name__,
            "modules": sorted(name for name in sys.modules if name.startswith("vllm_kvpp")),
            "num_process_groups": len(dist.distributed_c10d._world.pg_map),
            "wrapped_layers": sum("prepare_kv_cache_update" in vars(layer) for layer in layers.values()),
            "is_runner_wrapped": "execute_model" in vars(runner),
            "num_model_hooks": len(runner.get_model()._forward_pre_hooks),
            "cache_bytes": sum({c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in caches}.values()),
        }
