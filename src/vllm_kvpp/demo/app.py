"""The recipe of the demo: a vLLM server with KVPP and one without it, and the same questions to both."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from vllm_kvpp.demo.capacity import expect_capacity, read_shape
from vllm_kvpp.demo.client import Answer, ServerClient
from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.interrupts import Interrupts
from vllm_kvpp.demo.machine import check_checkpoint, check_memory, check_tp_size, check_vllm, choose_port, find_cpus
from vllm_kvpp.demo.progress import ProgressReporter
from vllm_kvpp.demo.questions import NUM_WORDS, make_batches
from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR
from vllm_kvpp.demo.results import DemoResult, KVPPRun, RankReport, ServerRun, parse_report
from vllm_kvpp.demo.sabotage import NoTransport
from vllm_kvpp.demo.server import RunningServer, run_server
from vllm_kvpp.demo.vllm_command import DTYPE_BYTES, ServerSettings, make_command


@dataclass(frozen=True)
class DemoOptions:
    """What the user chose. `port` None picks a free one."""

    tp_size: int
    num_questions: int
    kv_cache_bytes: int
    timeout_seconds: float
    port: int | None = None


class Demo:
    """One run of the demo on this machine; making it checks whether the machine will do."""

    def __init__(self, options: DemoOptions, *, progress: ProgressReporter, interrupts: Interrupts) -> None:
        check_vllm()
        check_checkpoint(CHECKPOINT_DIR)
        self._shape = read_shape(CHECKPOINT_DIR / "config.json")
        check_tp_size(options.tp_size, self._shape)
        self._cpus = find_cpus(options.tp_size)
        check_memory(tp_size=options.tp_size, kv_cache_bytes=options.kv_cache_bytes)
        choose_port(options.port)
        self._options = options
        self._progress = progress
        self._interrupts = interrupts
        self._batches = make_batches(options.num_questions)

    def run(self, *, log_dir: Path, scratch_dir: Path) -> DemoResult:
        """Run both servers, one after the other. What they leave behind in files goes to `scratch_dir`.

        Raises:
            DemoError: a server could not be started, or failed while it was in use.
            Interrupted: the user asked to stop.
        """
        settings = ServerSettings(
            model_path=CHECKPOINT_DIR,
            tp_size=self._options.tp_size,
            kv_cache_bytes=self._options.kv_cache_bytes,
            cpus=self._cpus,
            log_dir=log_dir,
            scratch_dir=scratch_dir,
        )
        on = self._run_with_kvpp(settings)
        off = self._run_without_kvpp(settings)
        return DemoResult(
            tp_size=settings.tp_size,
            kv_cache_bytes=settings.kv_cache_bytes,
            expected=expect_capacity(
                self._shape,
                tp_size=settings.tp_size,
                kv_cache_bytes=settings.kv_cache_bytes,
                block_size=off.cache.block_size,
                dtype_bytes=DTYPE_BYTES,
            ),
            questions=tuple(chain.from_iterable(self._batches)),
            on=on,
            off=off,
        )

    def _run_with_kvpp(self, settings: ServerSettings) -> KVPPRun:
        with self._serve(settings, with_kvpp=True) as server:
            measured = self._measure(server, "Asking the questions with KVPP")
            reports = self._read_reports(server.client)
            with self._progress.stage("Asking again with the transfers broken on purpose"):
                self._switch_transfers(server.client, "demo_break_transfers", is_broken=True)
                broken_answers = self._ask(server.client)
            broken_reports = self._read_reports(server.client)
            with self._progress.stage("Asking again with the transfers mended"):
                self._switch_transfers(server.client, "demo_mend_transfers", is_broken=False)
                mended_answers = self._ask(server.client)
        return KVPPRun(
            server=measured,
            reports=reports,
            broken_answers=broken_answers,
            broken_bytes=sum(report.moved_bytes for report in broken_reports)
            - sum(report.moved_bytes for report in reports),
            mended_answers=mended_answers,
        )

    def _run_without_kvpp(self, settings: ServerSettings) -> ServerRun:
        with self._serve(settings, with_kvpp=False) as server:
            return self._measure(server, "Asking the same questions without KVPP")

    @contextmanager
    def _serve(self, settings: ServerSettings, *, with_kvpp: bool) -> Iterator[RunningServer]:
        name = "with KVPP" if with_kvpp else "without KVPP"
        command = make_command(settings, with_kvpp=with_kvpp, port=choose_port(self._options.port))
        with ExitStack() as stack:
            with self._progress.stage(f"Starting vLLM {name}") as on_phase:
                server = stack.enter_context(
                    run_server(
                        command,
                        timeout_seconds=self._options.timeout_seconds,
                        interrupts=self._interrupts,
                        on_phase=on_phase,
                    )
                )
            yield server

    def _measure(self, server: RunningServer, title: str) -> ServerRun:
        client = server.client
        with self._interrupts.allowed():
            cache = client.read_cache_size()
            # The first generation takes seconds longer than any later one.
            client.ask([self._batches[0][0].prompt], num_tokens=1)
        cache_bytes = self._call_workers(client, "demo_cache_bytes")
        started = time.monotonic()
        with self._progress.stage(title):
            answers = self._ask(client)
        return ServerRun(
            cache=cache,
            cache_bytes=tuple(rank["num_bytes"] for rank in cache_bytes),
            answers=answers,
            start_seconds=server.start_seconds,
            answer_seconds=time.monotonic() - started,
        )

    def _ask(self, client: ServerClient) -> tuple[Answer, ...]:
        answers: list[Answer] = []
        for batch in self._batches:
            with self._interrupts.allowed():
                answers += client.ask([question.prompt for question in batch], num_tokens=NUM_WORDS)
        return tuple(answers)

    def _read_reports(self, client: ServerClient) -> tuple[RankReport, ...]:
        return tuple(parse_report(report) for report in self._call_workers(client, "kvpp_report"))

    def _call_workers(self, client: ServerClient, method: str) -> tuple[Any, ...]:
        with self._interrupts.allowed():
            return client.call_workers(method, num_workers=self._options.tp_size)

    def _switch_transfers(self, client: ServerClient, method: str, *, is_broken: bool) -> None:
        transports = {result["transport"] for result in self._call_workers(client, method)}
        if (transports == {NoTransport.__name__}) is not is_broken or len(transports) != 1:
            raise DemoError(f"{method} left the ranks with these transports: {', '.join(sorted(transports))}.")
