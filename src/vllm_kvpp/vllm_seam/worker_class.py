"""The worker class as vLLM resolves it: ours over whatever the platform chose, carried in its qualified name."""

from functools import cache
from typing import Any

_PREFIX = f"{__name__}.KVPPWorker<"


def name_kvpp_worker(base: str) -> str:
    """The qualified name of our worker over `base`, e.g. `….KVPPWorker<vllm:v1:worker:cpu_worker:CPUWorker>`.

    The name alone says everything, so that it works in any process, spawned, forked or remote.
    """
    return f"{_PREFIX}{base.replace('.', ':')}>"


def is_kvpp_worker(name: str) -> bool:
    """Whether `name` came from `name_kvpp_worker`."""
    return name.startswith(_PREFIX)


@cache
def _make_worker_class(base: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_kvpp.vllm_seam.worker import KVPPWorkerMixin

    base_class = resolve_obj_by_qualname(base)
    return type(f"KVPP{base_class.__name__}", (KVPPWorkerMixin, base_class), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name.startswith("KVPPWorker<") and name.endswith(">"):
        return _make_worker_class(name.removeprefix("KVPPWorker<").removesuffix(">").replace(":", "."))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
