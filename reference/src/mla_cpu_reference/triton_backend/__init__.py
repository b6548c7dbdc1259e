"""A Triton backend named `cpu` that compiles nothing: with `TRITON_INTERPRET=1` Triton's interpreter runs every kernel.

Triton finds a backend by the entry point `triton.backends`. It is not in this package's metadata: vLLM would take any
CPU process for one with Triton, and choose model runner V2. A process gets it from a folder on its `PYTHONPATH`.
"""

from pathlib import Path

_DISTRIBUTION = "mla-cpu-reference-triton"


def write_backend(folder: Path) -> None:
    """Let processes with `folder` on their `PYTHONPATH` find this backend; they need `TRITON_INTERPRET=1` too."""
    metadata = folder / f"{_DISTRIBUTION.replace('-', '_')}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[triton.backends]\ncpu = {__name__}\n")
