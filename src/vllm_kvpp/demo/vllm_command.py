"""The command line and the environment of the demo's vLLM servers."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_kvpp.demo.client import MODEL_NAME
from vllm_kvpp.demo.server import ServerCommand
from vllm_kvpp.demo.vllm_metadata import write_vllm_metadata

# What the command `vllm` runs, in this interpreter's environment whatever is on the PATH.
VLLM_MODULE = "vllm.entrypoints.cli.main"
DTYPE = "float32"
DTYPE_BYTES = 4
MAX_MODEL_LEN = 256
MAX_CPUS_PER_RANK = 4
# vLLM's CPU rotary kernel is wrong for the queries of MLA models; the native forward is right.
COMPILATION_CONFIG = {"custom_ops": ["all", "-rotary_embedding"]}
# Named, so that a CPU with AMX, where vLLM prefers another backend and block size, shows the same numbers.
ATTENTION_BACKEND = "CPU_MLA"


@dataclass(frozen=True)
class ServerSettings:
    """What the two servers have in common."""

    model_path: Path
    tp_size: int
    kv_cache_bytes: int
    cpus: tuple[int, ...]
    log_dir: Path
    scratch_dir: Path


def make_command(settings: ServerSettings, *, with_kvpp: bool, port: int) -> ServerCommand:
    """Write the command of one server; with and without KVPP they differ in the switch and in the demo's extension."""
    extension = "sabotage.SabotageExtension" if with_kvpp else "cache_meter.CacheMeterExtension"
    argv = [
        *(sys.executable, "-m", VLLM_MODULE, "serve", str(settings.model_path)),
        *("--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--tensor-parallel-size", str(settings.tp_size), "--enforce-eager"),
        *("--dtype", DTYPE, "--max-model-len", str(MAX_MODEL_LEN), "--attention-backend", ATTENTION_BACKEND),
        *("--kv-cache-memory-bytes", str(settings.kv_cache_bytes)),
        *("--compilation-config", json.dumps(COMPILATION_CONFIG)),
        *("--worker-extension-cls", f"vllm_kvpp.demo.{extension}"),
    ]
    if with_kvpp:
        argv += ["--additional-config", json.dumps({"enable_kvpp": True})]
    return ServerCommand(
        argv=tuple(argv),
        env=make_env(os.environ, settings),
        port=port,
        log_path=settings.log_dir / ("with-kvpp.log" if with_kvpp else "without-kvpp.log"),
    )


def make_env(environ: Mapping[str, str], settings: ServerSettings) -> dict[str, str]:
    """Write the environment of a server.

    Of `environ` vLLM's own settings are left out: one such as VLLM_CPU_KVCACHE_SPACE or VLLM_API_KEY would change what
    the demo measures.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("VLLM_")}
    metadata_dir = settings.scratch_dir / "metadata"
    if write_vllm_metadata(metadata_dir):
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(metadata_dir), environ.get("PYTHONPATH"))))
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(settings.scratch_dir),
        "VLLM_CPU_OMP_THREADS_BIND": bind_ranks(settings.cpus, settings.tp_size),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "kvpp",
        "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc
    }


def bind_ranks(cpus: Sequence[int], tp_size: int) -> str:
    """Give each rank CPUs of its own, in vLLM's form: `0,1|2,3`."""
    per_rank = min(len(cpus) // tp_size, MAX_CPUS_PER_RANK)
    assert per_rank > 0, f"{len(cpus)} CPUs for {tp_size} ranks"
    return "|".join(
        ",".join(str(cpu) for cpu in cpus[first : first + per_rank]) for first in range(0, tp_size * per_rank, per_rank)
    )
