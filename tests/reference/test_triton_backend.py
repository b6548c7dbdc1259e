"""Triton's interpreter as a backend: found only where it was written to, and right where vLLM's kernels need it."""

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from mla_cpu_reference.triton_backend import write_backend

from vllm_kvpp.demo.vllm_metadata import write_vllm_metadata

pytestmark = pytest.mark.slow

KERNEL = """
import torch, triton
import triton.language as tl

@triton.jit
def add_row_sums(table, scale, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    values = tl.load(table + row * width + column, mask=column < width, other=0.0)
    tl.store(out + row, tl.sum(values, axis=0) * scale)
"""
RUN = """
table = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
out = torch.zeros(5)
add_row_sums[(5,)](table, 2.0, out, 12, BLOCK=16)
torch.testing.assert_close(out, 2.0 * table.sum(1))
print("equal")
"""


def _run(folder: Path, *files: str, interpret: str = "1", reference: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script of these texts; Triton reads kernels from a file."""
    script = folder / "script.py"
    script.write_text("\n".join(files))
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "TRITON_INTERPRET": interpret,
        "MLA_CPU_REFERENCE": reference,
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def test_a_kernel_computes_what_torch_does(tmp_path: Path) -> None:
    write_backend(tmp_path)
    result = _run(tmp_path, KERNEL, RUN)

    assert result.stdout.strip() == "equal", result.stderr


def test_without_the_interpreter_a_kernel_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write_backend(tmp_path)
    result = _run(tmp_path, KERNEL, RUN, interpret="0")

    assert result.returncode != 0
    assert "set TRITON_INTERPRET=1" in result.stderr


@pytest.mark.parametrize("is_written", [False, True])
def test_vllm_has_triton_only_where_the_backend_was_written(tmp_path: Path, is_written: bool) -> None:
    if is_written:
        write_backend(tmp_path)
    write_vllm_metadata(tmp_path)
    result = _run(tmp_path, "from vllm.triton_utils import HAS_TRITON", "print(HAS_TRITON)")

    assert result.stdout.split()[-1] == str(is_written), result.stderr


def test_the_package_itself_declares_no_triton_backend() -> None:
    groups = {entry.group for entry in distribution("vllm-mla-cpu-reference").entry_points}
    assert groups == {"vllm.general_plugins"}


def test_the_part_refuses_a_process_that_started_without_what_it_needs(tmp_path: Path) -> None:
    result = _run(
        tmp_path, "from mla_cpu_reference.plugin import register", "register()", interpret="0", reference="runner_v2"
    )

    assert result.returncode != 0
    assert "TRITON_INTERPRET=1; a folder on PYTHONPATH that" in result.stderr


TOP_K_TOP_P = """
import torch
from mla_cpu_reference.plugin import register
register()
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, apply_top_k_top_p_pytorch
logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
k, p = torch.full((9,), 5), torch.full((9,), 0.7)
assert torch.equal(apply_top_k_top_p(logits.clone(), k, p), apply_top_k_top_p_pytorch(logits.clone(), k, p))
print("equal")
"""


def test_top_k_and_top_p_are_sampled_as_in_torch(tmp_path: Path) -> None:
    write_backend(tmp_path)
    write_vllm_metadata(tmp_path)
    result = _run(tmp_path, TOP_K_TOP_P, reference="runner_v2")

    assert result.stdout.split()[-1:] == ["equal"], result.stderr
