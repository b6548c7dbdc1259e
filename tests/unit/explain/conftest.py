"""Lines as vLLM writes them: the format strings of vLLM 0.32.0, and of earlier releases where it says so."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vllm_kvpp.cli import app
from vllm_kvpp.explain.explanation import explain
from vllm_kvpp.explain.gain import Hints
from vllm_kvpp.explain.log_file import LogExcerpt, parse_line

ARGUMENTS = (
    "(APIServer pid=1) INFO 11-30 12:35:19 [api_utils.py:286] non-default args: {{'model_tag': '{model}', 'host': "
    "'127.0.0.1', 'model': '{model}', 'max_model_len': {length}, 'enforce_eager': True, 'tensor_parallel_size': {tp}"
    "{more}}}"
)
ENGINE = (
    "({process} pid={pid}) INFO 11-30 12:35:29 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='{model}', speculative_config={draft}, tokenizer='{model}', skip_tokenizer_init=False, tokenizer_mode=auto, "
    "trust_remote_code=False, dtype=torch.{dtype}, max_seq_len={length}, download_dir=None, load_format=auto, "
    "tensor_parallel_size={tp}, pipeline_parallel_size={pp}, data_parallel_size={dp}, "
    "decode_context_parallel_size={dcp}, dcp_comm_backend=ag_rs, enforce_eager=True, "
    "kv_cache_dtype={kv_cache_dtype}, device_config={device}, seed=0"
)
GPU_MEMORY = "(Worker_TP0 pid=3) INFO 11-30 12:36:19 [gpu_worker.py:759] Available KV cache memory: {gib} GiB"
CPU_MEMORY = (
    "(Worker_TP{rank} pid={pid}) INFO 11-30 12:36:19 [cpu_worker.py:260] Explicitly set ({gib}/11.09) GiB for KV cache "
    "on node 0."
)
POOL = (
    "({process} pid={pid}) INFO 11-30 12:36:19 [kv_cache_utils.py:2327] {device} KV cache size: {tokens:,} tokens, "
    "Maximum concurrency for {length:,} tokens per request: {concurrency:.2f}x"
)
# Up to vLLM 0.31.
OLD_SIZE = "(EngineCore_0 pid=2) INFO 11-30 12:36:19 [kv_cache_utils.py:864] GPU KV cache size: {tokens:,} tokens"
OLD_CONCURRENCY = (
    "(EngineCore_0 pid=2) INFO 11-30 12:36:19 [kv_cache_utils.py:868] Maximum concurrency for {length:,} tokens per "
    "request: {concurrency:.2f}x"
)


def arguments_line(*, model="deepseek-ai/DeepSeek-V3", length=4096, tp=8, more=""):
    return ARGUMENTS.format(model=model, length=length, tp=tp, more=more)


def engine_line(**changes):
    values = {
        "process": "EngineCore",
        "pid": 2,
        "model": "deepseek-ai/DeepSeek-V3",
        "draft": "None",
        "dtype": "bfloat16",
        "length": 4096,
        "tp": 8,
        "pp": 1,
        "dp": 1,
        "dcp": 1,
        "kv_cache_dtype": "auto",
        "device": "cuda",
    }
    return ENGINE.format(**values | changes)


def pool_line(*, tokens=715_072, length=4096, concurrency=None, process="EngineCore", pid=2, device="GPU"):
    concurrency = concurrency or tokens / length
    return POOL.format(process=process, pid=pid, device=device, tokens=tokens, length=length, concurrency=concurrency)


def gpu_log(**changes):
    """DeepSeek-V3 with TP 8: 46.8 GiB hold 11,173 blocks of 64 tokens."""
    return [arguments_line(), engine_line(**changes), GPU_MEMORY.format(gib=46.8), pool_line()]


@pytest.fixture
def write():
    """What writes single lines, and a whole log."""
    return SimpleNamespace(
        arguments=arguments_line,
        engine=engine_line,
        gpu_memory=GPU_MEMORY.format,
        cpu_memory=CPU_MEMORY.format,
        pool=pool_line,
        old_size=OLD_SIZE.format,
        old_concurrency=OLD_CONCURRENCY.format,
        gpu_log=gpu_log,
    )


@pytest.fixture
def explained():
    """Explain lines as if they were the log `server.log`."""

    def run(lines, **hints):
        excerpt = LogExcerpt(tuple(parse_line(line) for line in lines))
        return explain("server.log", excerpt, Hints(**hints))

    return run


@pytest.fixture
def run():
    return lambda *arguments, **options: CliRunner().invoke(app, ["explain", *map(str, arguments)], **options)


@pytest.fixture
def log_path(tmp_path):
    """Write lines to a file and name it."""

    def write(lines):
        path = tmp_path / "server.log"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write
