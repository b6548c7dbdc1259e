"""`vllm-kvpp demo` with the fake server in vLLM's place.

fake_demo.py ON_MODE OFF_MODE PIDS_FILE ARGUMENTS...
"""

import os
import sys
from pathlib import Path

import vllm_kvpp.demo.app as demo_app
import vllm_kvpp.demo.server as demo_server
from vllm_kvpp.cli import app
from vllm_kvpp.demo.capacity import ModelShape, expect_capacity
from vllm_kvpp.demo.server import ServerCommand

on_mode, off_mode, pids_file = sys.argv[1:4]
shape = ModelShape(num_layers=8, num_heads=4, latent_dim=576)


def make_command(settings, *, with_kvpp, port):
    expected = expect_capacity(
        shape, tp_size=2, kv_cache_bytes=settings.kv_cache_bytes, block_size=16, dtype_bytes=demo_app.DTYPE_BYTES
    )
    return ServerCommand(
        argv=(
            *(sys.executable, str(Path(__file__).with_name("fake_server.py")), str(port)),
            *(on_mode if with_kvpp else off_mode, f"{pids_file}{'on' if with_kvpp else 'off'}"),
        ),
        env={
            **os.environ,
            "FAKE_BLOCKS_ON": str(expected.num_blocks_on),
            "FAKE_BLOCKS_OFF": str(expected.num_blocks_off),
        },
        port=port,
        log_path=settings.log_dir / ("with-kvpp.log" if with_kvpp else "without-kvpp.log"),
    )


demo_app.make_command = make_command
demo_app.check_vllm = lambda: None
demo_app.check_checkpoint = lambda _folder: None
demo_app.read_shape = lambda _path: shape
demo_server.POLL_SECONDS = 0.05
sys.argv = ["vllm-kvpp", "demo", *sys.argv[4:]]
app()
