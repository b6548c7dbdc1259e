"""Run engines in processes of their own, with a limit, and leave none behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from mla_cpu_reference.parts import ENVIRONMENT_VARIABLE
from mla_cpu_reference.triton_backend import write_backend

from vllm_kvpp.demo.server import remove_shared_memory
from vllm_kvpp.demo.vllm_metadata import write_vllm_metadata

HERE = Path(__file__).parent
# The CPU rotary op is wrong for more than one token per call in vLLM 0.32; the native one is not.
NATIVE_ROPE = {"custom_ops": ["all", "-rotary_embedding"]}
COMMON_ENGINE = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    # Named, so that a CPU with AMX runs the same backend and block size.
    "attention_backend": "CPU_MLA",
    "compilation_config": NATIVE_ROPE,
    "worker_extension_cls": "worker_extension.ProbeExtension",
}


@dataclass(frozen=True)
class Answer:
    """One request's output; logprobs as exact hexadecimal floats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[dict[str, str], ...]
    num_cached_tokens: int


@dataclass(frozen=True)
class EngineRun:
    """What one engine said."""

    num_gpu_blocks: int
    block_size: int
    max_model_len: int
    worker_cls: str
    actions: list[Any]
    log: str

    @property
    def num_tokens(self) -> int:
        return self.num_gpu_blocks * self.block_size

    def answers(self, action_index: int) -> tuple[Answer | None, ...]:
        """The answers of a `generate` or `serve` action; None where a request was aborted before its first."""
        action = self.actions[action_index]
        items = action["answers"] if isinstance(action, dict) else action
        return tuple(
            item and Answer(tuple(item["token_ids"]), tuple(item["logprobs"]), item["num_cached_tokens"])
            for item in items
        )


@dataclass
class ProcessResult:
    returncode: int
    output: str
    seconds: float
    leftovers: list[int] = field(default_factory=list)


def bind_workers(num_workers: int) -> str:
    """The CPUs of the workers, in turn: with one NUMA node vLLM has to be told."""
    cpus = sorted(os.sched_getaffinity(0))
    return "|".join(str(cpus[rank % len(cpus)]) for rank in range(num_workers))


def engine_environment(num_workers: int, folder: Path, reference: Sequence[str] = ()) -> dict[str, str]:
    """The environment in which several workers start on a machine with one NUMA node; `folder` takes what it needs.

    `reference` names the parts of the reference platform to switch on.
    """
    write_vllm_metadata(folder)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": bind_workers(num_workers),
        "PYTHONPATH": os.pathsep.join((str(HERE), str(folder))),
        ENVIRONMENT_VARIABLE: ",".join(reference),
    }
    # It would silently override kv_cache_memory_bytes.
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if "runner_v2" in reference:
        write_backend(folder)
        environment |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    return environment


def write_plugin(folder: Path, name: str) -> None:
    """Let vLLM find the module `name` of this folder as a plugin, in processes with `folder` on their path."""
    metadata = folder / f"{name}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")


def run_process(
    command: list[str],
    environment: dict[str, str],
    log_path: Path,
    timeout_seconds: float,
    grace_seconds: float = 5,
) -> ProcessResult:
    """Run a command to its end or its limit; everything it started is gone afterwards.

    What is left of it after `grace_seconds` is killed.
    """
    started = time.monotonic()
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        family = _Family(process.pid)
        try:
            returncode = family.wait(process, timeout_seconds)
        finally:
            leftovers = family.end(grace_seconds)
            remove_shared_memory(log_path)
    return ProcessResult(returncode, log_path.read_text(errors="replace"), time.monotonic() - started, leftovers)


class _Family:
    """A process and everything that it started, remembered while it runs."""

    def __init__(self, pid: int) -> None:
        self._known: dict[int, psutil.Process] = {pid: psutil.Process(pid)}

    def wait(self, process: subprocess.Popen[bytes], timeout_seconds: float) -> int:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            self._remember()
            try:
                return process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        raise TimeoutError(f"no end after {timeout_seconds:g} s: {process.args}")

    def _remember(self) -> None:
        for known in list(self._known.values()):
            try:
                self._known.update({child.pid: child for child in known.children(recursive=True)})
            except psutil.NoSuchProcess:
                continue

    def end(self, grace_seconds: float) -> list[int]:
        _, alive = psutil.wait_procs(list(self._known.values()), timeout=grace_seconds)
        trackers = [process for process in alive if _is_resource_tracker(process)]
        leftovers = [process for process in alive if process not in trackers]
        self._kill(leftovers)
        # They remove the shared memory of the others, and then end by themselves.
        _, stuck = psutil.wait_procs(trackers, timeout=5)
        self._kill(stuck)
        return [process.pid for process in (*leftovers, *stuck)]

    @staticmethod
    def _kill(processes: list[psutil.Process]) -> None:
        for process in processes:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=5)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def run_engine(
    engine: dict[str, Any],
    actions: list[dict[str, Any]],
    folder: Path,
    *,
    reference: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    timeout_seconds: float = 300,
    decode: str = "transfer",
) -> EngineRun:
    """Start a `vllm.LLM`, run the actions, and return what it said.

    `reference` names parts of the reference platform; `environment` is added to the usual one. With KVPP on, decode
    begins in the mode `decode`, whatever the configuration says: most actions look at transfers, of which there are
    more with "transfer".

    Raises:
        AssertionError: it failed; with the end of its log.
        TimeoutError: it did not end within the limit.
    """
    engine = {**COMMON_ENGINE, **engine}
    num_workers = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    task_path, result_path = folder / "task.json", folder / "result.json"
    begin = [{"kind": "rpc", "method": "set_decode", "args": [decode]}] if _has_kvpp(engine) else []
    task_path.write_text(json.dumps({"engine": engine, "actions": begin + actions}))
    command = [sys.executable, str(HERE / "llm_script.py"), str(task_path), str(result_path)]
    environment = {**engine_environment(num_workers, folder, reference), **environment}
    # The script has written its result; how its workers end is not what these tests look at.
    result = run_process(command, environment, folder / "engine.log", timeout_seconds, grace_seconds=0.2)
    assert result.returncode == 0, f"the engine failed:\n{result.output[-6000:]}"
    said = json.loads(result_path.read_text())
    said["actions"] = said["actions"][len(begin) :]
    return EngineRun(**said, log=result.output)


def _has_kvpp(engine: Mapping[str, Any]) -> bool:
    return bool(engine.get("additional_config", {}).get("enable_kvpp"))
