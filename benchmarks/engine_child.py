"""One `vllm.LLM` that decodes on request and says how long each step took. Usage: engine_child.py SOCKET SETTINGS.

Started by `decode_engine.py`. SETTINGS is a JSON file: the arguments of `LLM` under `llm`, `are_blocks_scattered` and
`keeps_histories`.
Once the engine is there it connects to SOCKET and says what the engine is, then answers one request after the other,
and ends when the other side closes.
"""

import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


class Decoder:
    """Decodes a batch step by step. Needs `VLLM_ENABLE_V1_MULTIPROCESSING=0`: a step is one call in this process."""

    def __init__(self, llm: LLM, *, has_kvpp: bool, keeps_histories: bool) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._has_kvpp = has_kvpp
        self._keeps_histories = keeps_histories
        self._num_batches = 0

    def describe(self) -> dict[str, Any]:
        """What the engine is, in plain values."""
        cache = self._engine.vllm_config.cache_config
        return {"num_blocks": cache.num_gpu_blocks, "block_size": cache.block_size, "kvpp": self._report()}

    def scatter_free_blocks(self) -> None:
        """Let the scheduler hand out blocks in a random order from now on."""
        pool = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        random.Random(0).shuffle(blocks)
        pool.free_blocks(blocks)

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Prefill the prompts, decode some steps to warm up, and time the following ones.

        The batch is gone afterwards; what the cache keeps of it are the whole blocks of its prompts, if anything.
        """
        if request["modes"] is not None:
            self._llm.collective_rpc("set_modes", args=tuple(request["modes"]))
        if self._keeps_histories:
            self._compute_histories(request["prompts"])
        names = self._add(request["prompts"])
        try:
            prefill_seconds = self._prefill(names)
            for _ in range(request["num_warm_up_steps"]):
                self._time_step(names)
            before = self._report()
            step_seconds = [self._time_step(names) for _ in range(request["num_steps"])]
            after = self._report()
        finally:
            self._engine.abort_request(names)
        return {
            "prefill_seconds": prefill_seconds,
            "step_seconds": step_seconds,
            "counters": _subtract(after.get("counters", {}), before.get("counters", {})),
        }

    def _compute_histories(self, prompts: list[list[int]]) -> None:
        """Have the cache hold the prompts but for their last tokens, so that one step prefills the whole batch."""
        for prompt in prompts:
            self._add([prompt], num_tokens=1)
            while self._engine.has_unfinished_requests():
                self._engine.step()

    def _add(self, prompts: list[list[int]], num_tokens: int | None = None) -> list[str]:
        """Add a request for each prompt, which ends after `num_tokens`, or else has to be aborted."""
        self._num_batches += 1
        names = [f"{self._num_batches}-{index}" for index in range(len(prompts))]
        longest = self._engine.vllm_config.model_config.max_model_len
        for name, prompt in zip(names, prompts, strict=True):
            max_tokens = longest - len(prompt) if num_tokens is None else num_tokens
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return names

    def _prefill(self, names: list[str]) -> float:
        started = time.perf_counter()
        waiting = set(names)
        while waiting:
            answered = {output.request_id for output in self._engine.step()}
            if not answered:
                raise RuntimeError(f"The pool does not hold the whole batch; {len(waiting)} requests wait.")
            waiting -= answered
        return time.perf_counter() - started

    def _time_step(self, names: list[str]) -> float:
        started = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - started
        if len(outputs) != len(names):
            raise RuntimeError(f"A step decoded {len(outputs)} of {len(names)} requests; the pool is too small.")
        return seconds

    def _report(self) -> dict[str, Any]:
        if not self._has_kvpp:
            return {}
        report: dict[str, Any] = self._llm.collective_rpc("kvpp_report")[0]
        return report


def _subtract(after: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """The difference of the counters that are numbers; the others are left out."""
    return {name: value - before[name] for name, value in after.items() if isinstance(value, (int, float))}


def _answer(connection: Connection, decoder: Decoder) -> None:
    connection.send(decoder.describe())
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(decoder.measure(request))


def _end_at_once() -> None:
    """End with all workers, but not by vLLM's way out, which waits some seconds for each of them.

    Shared memory is then removed by the resource tracker, which outlives this process for a moment.
    """
    for process in multiprocessing.active_children():
        process.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Start the engine, connect, and answer until the other side closes."""
    settings = json.loads(Path(sys.argv[2]).read_text())
    arguments = settings["llm"]
    decoder = Decoder(
        LLM(**arguments),
        has_kvpp=arguments["additional_config"].get("enable_kvpp", False),
        keeps_histories=settings["keeps_histories"],
    )
    if settings["are_blocks_scattered"]:
        decoder.scatter_free_blocks()
    _answer(Client(sys.argv[1], family="AF_UNIX"), decoder)
    _end_at_once()


if __name__ == "__main__":
    main()
