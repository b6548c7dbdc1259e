"""The worker: the platform's own, with KVPP called at four points of its life."""

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_kvpp.vllm_seam.session import KVPPSession


class KVPPWorkerMixin:
    """Stands before a platform's worker class in the method resolution order; see `worker_class`.

    Touches: `WorkerBase.init_device`, `determine_available_memory`, `initialize_from_config`. Because: see
    `symbols.py`. Checked by: `check_seam`.
    """

    _kvpp: KVPPSession

    # What the class it is mixed into provides.
    vllm_config: Any
    device: Any
    model_runner: Any
    get_kv_cache_spec: Any

    def init_device(self) -> None:
        """Make the KVPP group behind vLLM's own groups and before memory is profiled."""
        super().init_device()  # type: ignore[misc]
        self._kvpp = KVPPSession(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """The logical budget: what the engine has to believe to arrive at the blocks that fit."""
        available_bytes: int = super().determine_available_memory()  # type: ignore[misc]
        return self._kvpp.plan_budget(self.get_kv_cache_spec(), available_bytes, self.model_runner)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache where the plan puts it, then attach to the runner."""
        super().initialize_from_config(self._kvpp.place(kv_cache_config))  # type: ignore[misc]
        self._kvpp.attach(self.model_runner)

    def kvpp_report(self) -> dict[str, Any]:
        """This rank's plan, memory and counters; for `collective_rpc("kvpp_report")`."""
        return self._kvpp.report()
