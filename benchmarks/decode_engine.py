"""An engine in a process of its own that decodes a given batch, and stays until it is closed.

Several may be there at once: one that has had nothing to do for `IDLE_SECONDS` uses no CPU.
"""

import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import reference_part
from tiny_model import BLOCK_SIZE, DTYPE, NUM_LAYERS, PAGE_BYTES, VOCABULARY_SIZE

from vllm_kvpp.demo.machine import find_cpus
from vllm_kvpp.demo.processes import ProcessTree
from vllm_kvpp.demo.server import remove_shared_memory
from vllm_kvpp.demo.startup_log import find_first_error, read_log, take_last_lines
from vllm_kvpp.demo.vllm_command import ATTENTION_BACKEND, COMPILATION_CONFIG, bind_ranks
from vllm_kvpp.demo.vllm_metadata import write_vllm_metadata

HERE = Path(__file__).parent
TP_SIZE = 2
# vLLM's workers look for work without a pause for one second, and then wait to be woken.
IDLE_SECONDS = 1.2
START_TIMEOUT_SECONDS = 600.0
STRETCH_TIMEOUT_SECONDS = 900.0
# The same in every engine, since KVPP sizes its staging memory by it; what is allocated follows from the blocks.
KV_CACHE_BYTES = 512 * 1024**2
NUM_LOG_LINES = 20
MAX_LINE_LENGTH = 300


class EngineError(Exception):
    """An engine did not start or did not go on; the message holds the end of its log."""


@dataclass(frozen=True)
class Batch:
    """Requests that all have `num_history_tokens` of history in their last step, and up to a block less before.

    The number of blocks that hold the history is therefore the same in every step of a stretch.
    """

    num_requests: int
    num_history_tokens: int

    @property
    def num_active_blocks(self) -> int:
        """Blocks that the history occupies in every decode step."""
        return self.num_requests * (self.num_history_tokens // BLOCK_SIZE)

    @property
    def active_bytes(self) -> int:
        """Bytes of those blocks over all layers."""
        return self.num_active_blocks * NUM_LAYERS * PAGE_BYTES

    def make_prompts(self) -> list[list[int]]:
        """The same made-up tokens in every call; prompts of another batch begin alike, and differ within a batch."""
        assert self.num_history_tokens % BLOCK_SIZE == 0, "a history of whole blocks"
        # The first decode step then has the first token of the last block in its history.
        length = self.num_history_tokens - BLOCK_SIZE + 1
        generators = [random.Random(number) for number in range(self.num_requests)]
        return [[generator.randrange(2, VOCABULARY_SIZE) for _ in range(length)] for generator in generators]


@dataclass(frozen=True)
class EngineSettings:
    """What differs between the engines of a benchmark.

    `kvpp` are the options under that key; None without KVPP. With `are_blocks_scattered` the engine hands out blocks
    in a random order, as one that has served for a while; otherwise those of one batch tend to be neighbours. With
    `keeps_histories` each history is computed once, in chunks, and then found in the cache by every stretch that has
    it, as the beginning of a longer one, too; that takes a part of the reference platform.
    """

    num_blocks: int
    batches: tuple[Batch, ...]
    kvpp: Mapping[str, Any] | None
    are_blocks_scattered: bool
    kv_cache_bytes: int = KV_CACHE_BYTES
    keeps_histories: bool = False

    def as_arguments(self, model: Path) -> dict[str, Any]:
        """The arguments of `vllm.LLM`."""
        max_model_len = max(batch.num_history_tokens for batch in self.batches) + BLOCK_SIZE
        additional_config = {} if self.kvpp is None else {"enable_kvpp": True, "kvpp": dict(self.kvpp)}
        return {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": DTYPE,
            "tensor_parallel_size": TP_SIZE,
            "enforce_eager": True,
            "attention_backend": ATTENTION_BACKEND,
            "compilation_config": COMPILATION_CONFIG,
            "worker_extension_cls": "transfer_extension.TransferExtension",
            "max_model_len": max_model_len,
            "max_num_seqs": max(batch.num_requests for batch in self.batches),
            "max_num_batched_tokens": self._choose_num_batched_tokens(max_model_len),
            "enable_prefix_caching": self.keeps_histories,
            # One block is vLLM's own.
            "num_gpu_blocks_override": self.num_blocks + 1,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "additional_config": additional_config,
        }

    def _choose_num_batched_tokens(self, max_model_len: int) -> int:
        """A whole prompt, or the whole batch where it is prefilled in one step: vLLM has no chunks for MLA on CPU."""
        if self.keeps_histories:
            return max_model_len
        return max(
            max_model_len, *(batch.num_requests * (batch.num_history_tokens + BLOCK_SIZE) for batch in self.batches)
        )


@dataclass(frozen=True)
class Stretch:
    """What some consecutive decode steps of one batch took: seconds of each, and what KVPP's counters grew by."""

    step_seconds: tuple[float, ...]
    prefill_seconds: float
    counters: Mapping[str, float]

    @property
    def moved_bytes_per_step(self) -> float:
        """Bytes of history, queries and outputs that were moved in a step, 0 without KVPP."""
        names = ("transferred_bytes", "query_bytes", "output_bytes")
        return sum(self.counters.get(name, 0) for name in names) / len(self.step_seconds)


class DecodeEngine:
    """The parent's side of one engine; see `run_decode_engine`."""

    def __init__(self, connection: Connection, log_path: Path) -> None:
        self._connection = connection
        self._log_path = log_path
        self.facts: dict[str, Any] = self._receive()

    def measure(
        self, batch: Batch, *, modes: tuple[str, str] | None, num_warm_up_steps: int, num_steps: int
    ) -> Stretch:
        """Decode `batch` while there is no other, with these `kvpp.transfer` and `kvpp.decode`, or None without KVPP.

        Raises:
            EngineError: the engine ended, or gave no answer in time.
        """
        assert num_warm_up_steps + num_steps < BLOCK_SIZE, "a stretch has to stay in its last block"
        request = {
            "prompts": batch.make_prompts(),
            "modes": modes,
            "num_warm_up_steps": num_warm_up_steps,
            "num_steps": num_steps,
        }
        self._connection.send(request)
        answer = self._receive()
        return Stretch(tuple(answer["step_seconds"]), answer["prefill_seconds"], answer["counters"])

    def _receive(self) -> dict[str, Any]:
        if not self._connection.poll(STRETCH_TIMEOUT_SECONDS):
            what = f"The engine gave no answer in {STRETCH_TIMEOUT_SECONDS:g} s."
            raise EngineError(_describe(what, self._log_path))
        try:
            answer: dict[str, Any] = self._connection.recv()
        except EOFError:
            raise EngineError(_describe("The engine ended while it was in use.", self._log_path)) from None
        return answer


@contextmanager
def run_decode_engine(settings: EngineSettings, *, model: Path, folder: Path) -> Iterator[DecodeEngine]:
    """Start an engine, and end every process of it on the way out.

    `folder` takes its log and its files; the folder above takes what several engines share.

    Raises:
        EngineError: it does not start.
    """
    settings_path, socket_path, log_path = folder / "engine.json", folder / "socket", folder / "engine.log"
    child = {
        "llm": settings.as_arguments(model),
        "are_blocks_scattered": settings.are_blocks_scattered,
        "keeps_histories": settings.keeps_histories,
    }
    settings_path.write_text(json.dumps(child))
    command = [sys.executable, str(HERE / "engine_child.py"), str(socket_path), str(settings_path)]
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(socket_path))
        server.listen(1)
        stack.callback(remove_shared_memory, log_path)
        environment = _make_environment(folder, keeps_histories=settings.keeps_histories)
        tree = ProcessTree(command, env=environment, log_path=log_path)
        stack.callback(tree.stop, grace_seconds=2.0)
        connection = stack.enter_context(_accept(server, tree, log_path))
        tree.refresh()
        yield DecodeEngine(connection, log_path)


def _accept(server: socket.socket, tree: ProcessTree, log_path: Path) -> Connection:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    server.settimeout(0.5)
    while time.monotonic() < deadline:
        try:
            accepted, _ = server.accept()
        except TimeoutError:
            tree.refresh()
            if tree.exit_code is not None:
                what = f"The engine ended while it was starting, with exit code {tree.exit_code}."
                raise EngineError(_describe(what, log_path)) from None
            continue
        accepted.setblocking(True)
        return Connection(accepted.detach())
    raise EngineError(_describe(f"The engine did not start within {START_TIMEOUT_SECONDS:g} s.", log_path))


def _make_environment(folder: Path, *, keeps_histories: bool) -> dict[str, str]:
    """The environment of an engine; of this one, vLLM's own settings are left out, since they would change it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    write_vllm_metadata(folder / "metadata")
    python_path = (str(HERE), str(folder / "metadata"), kept.get("PYTHONPATH"))
    plugins = ("kvpp", reference_part.PLUGIN) if keeps_histories else ("kvpp",)
    return {
        **kept,
        **(reference_part.ENVIRONMENT if keeps_histories else {}),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        # Of all engines of a benchmark: only the first one compiles.
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "compiled"),
        "VLLM_CPU_OMP_THREADS_BIND": bind_ranks(find_cpus(TP_SIZE), TP_SIZE),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": ",".join(plugins),
    }


def _describe(what: str, log_path: Path) -> str:
    log = read_log(log_path)
    last_lines = take_last_lines(log, NUM_LOG_LINES).splitlines()
    lines = (what, f"First error in its log: {find_first_error(log) or 'none'}", "The end of its log:", *last_lines)
    return "\n".join(line[:MAX_LINE_LENGTH] for line in lines)
