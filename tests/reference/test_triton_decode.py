"""vLLM's Triton decode kernel, interpreted: a head's output is the same whatever other heads are in the query.

This is what lets an owner attend for all ranks with the backend TRITON_MLA; the backend itself does not start on a CPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mla_cpu_reference.triton_backend import write_backend

from vllm_kvpp.demo.vllm_metadata import write_vllm_metadata

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

WIDTH, LATENT, PAGE, SPLITS, SCALE = 576, 512, 16, 2, 0.05
LENGTHS = (20, 37)
generator = torch.Generator().manual_seed(0)
cache = torch.randn(8, PAGE, 1, WIDTH, generator=generator)
table = torch.tensor([[3, 1, 0], [6, 2, 5]], dtype=torch.int32)
query = torch.randn(len(LENGTHS), 4, WIDTH, generator=generator)


def attend(query):
    rows, heads = query.shape[:2]
    output, sums = torch.zeros(rows, heads, LATENT), torch.zeros(rows, heads)
    logits = torch.zeros(rows, heads, SPLITS, LATENT + 1)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    decode_attention_fwd(
        query.contiguous(), cache, cache[..., :LATENT], output, sums, table, lengths, logits, SPLITS, SCALE, PAGE,
        k_scale=torch.ones(1), v_scale=torch.ones(1), is_mla=True,
    )
    return output


together = attend(query)
apart = torch.cat([attend(query[:, :2]), attend(query[:, 2:])], dim=1)
assert torch.equal(together, apart), (together - apart).abs().max()
for row, length in enumerate(LENGTHS):
    keys = cache[table[row].long()].flatten(0, 2)[:length]
    shares = (query[row] @ keys.T * SCALE).softmax(dim=-1)
    torch.testing.assert_close(together[row], shares @ keys[:, :LATENT], atol=1e-4, rtol=1e-4)
assert not torch.equal(together[:, :2], together[:, 2:])
print("equal")
"""


def test_heads_attend_together_as_they_do_apart_bit_for_bit(tmp_path: Path) -> None:
    write_backend(tmp_path)
    write_vllm_metadata(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )

    assert result.stdout.split()[-1:] == ["equal"], result.stderr[-3000:]
