"""Runs inside vLLM's workers (`--worker-extension-cls`): measures the KV cache that a rank has allocated."""

from typing import Any


class CacheMeterExtension:
    """Mixed into the worker by vLLM; its method is called through `/collective_rpc`. Must not import vllm."""

    # What the worker that it is mixed into provides.
    model_runner: Any

    def demo_cache_bytes(self) -> dict[str, int]:
        """Bytes behind all KV cache tensors of this rank, each allocation counted once."""
        storages = [tensor.untyped_storage() for tensor in self.model_runner.kv_caches]
        return {"num_bytes": sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())}
