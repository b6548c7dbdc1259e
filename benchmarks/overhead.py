"""What KVPP costs in latency: time to first token and time per output token, on ÷ off, by vLLM's own client.

Servers of all variants are started in turn, round after round; each gets a warm-up and then the measured runs of
`vllm bench serve`. Ratios are taken within a round.

Run: .venv/bin/python benchmarks/overhead.py
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from conversations import Sessions, serve_sessions
from ratios import Ratio, paired_ratios
from report import BenchmarkReport, ReportTable, publish
from servers import (
    MOVED,
    OFF,
    VARIANTS,
    ModelShape,
    Server,
    ServerSetup,
    Stage,
    make_environment,
    measure_rounds,
    write_model,
)

from vllm_kvpp.demo.client import MODEL_NAME
from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.vllm_command import VLLM_MODULE

TP_SIZE = 2
MODEL = ModelShape(num_layers=8, hidden_size=128, intermediate_size=256, max_model_len=2048)
CLIENT_TIMEOUT_SECONDS = 300
# By workload, variant and metric.
Ratios = dict[str, dict[str, dict[str, Ratio]]]
METRICS = {"ttft_ms": "median_ttft_ms", "tpot_ms": "mean_tpot_ms", "tokens_per_second": "total_token_throughput"}


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once, each of the same size in tokens."""

    name: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def description(self) -> str:
        """The sizes in words."""
        return f"{self.num_requests} requests × {self.prompt_tokens:,} prompt + {self.output_tokens} output tokens"


WORKLOADS = (
    Workload("decode-heavy", 8, 256, 128),
    Workload("decode behind long prompts", 4, 1024, 128),
    Workload("prefill-heavy", 8, 1024, 8),
)


@dataclass(frozen=True)
class Sample:
    """One run of the client: median TTFT and mean TPOT of its requests; what KVPP moved for it on one rank."""

    round: int
    variant: str
    workload: str
    ttft_ms: float
    tpot_ms: float
    tokens_per_second: float
    kvpp_counters: dict[str, float]

    @property
    def transferred_mb(self) -> float:
        """What one rank sent and received: history, decode queries and outputs."""
        return sum(self.kvpp_counters.get(name, 0) for name in MOVED) / 1e6


def run_client(url: str, setup: ServerSetup, workload: Workload, *, seed: int) -> dict[str, Any]:
    """Run `vllm bench serve` against a server, and return the document that it saves.

    Raises:
        DemoError: it failed or took too long, or not all requests succeeded.
    """
    result_path, log_path = setup.scratch_dir / "client.json", setup.scratch_dir / "client.log"
    result_path.unlink(missing_ok=True)
    command = make_client_command(url, setup.model_path, workload, seed=seed, result_path=result_path)
    environment = make_environment(setup)
    with log_path.open("w") as log, suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=CLIENT_TIMEOUT_SECONDS, check=False)
    if not result_path.exists():
        raise DemoError(f"`vllm bench serve` saved no result. The end of its log:\n{log_path.read_text()[-2000:]}")
    result: dict[str, Any] = json.loads(result_path.read_text())
    if result["completed"] != workload.num_requests:
        raise DemoError(f"{result['completed']} of {workload.num_requests} requests succeeded.")
    return result


def make_client_command(
    url: str, model_path: Path, workload: Workload, *, seed: int, result_path: Path
) -> tuple[str, ...]:
    """Write the command of the client; equal seeds send equal prompts."""
    return (
        *(sys.executable, "-m", VLLM_MODULE, "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--model", MODEL_NAME, "--tokenizer", str(model_path)),
        *("--dataset-name", "random", "--seed", str(seed), "--num-prompts", str(workload.num_requests)),
        *("--random-input-len", str(workload.prompt_tokens), "--random-output-len", str(workload.output_tokens)),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(result_path.parent), "--result-filename", result_path.name),
    )


def warm_up(url: str, workload: Workload) -> None:
    """Serve requests of the same sizes once: the first step of each size takes seconds."""
    requests = Sessions(
        num_sessions=workload.num_requests,
        num_turns=1,
        first_prompt_tokens=workload.prompt_tokens,
        turn_prompt_tokens=0,
        output_tokens=workload.output_tokens,
    )
    serve_sessions(url, requests, seed=0)


def measure_server(stage: Stage, server: Server, setup: ServerSetup, *, num_runs: int) -> list[Sample]:
    """Warm the server up with each workload, then measure each `num_runs` times."""
    stage.on_phase("warming up")
    for workload in WORKLOADS:
        warm_up(server.url, workload)
    samples = []
    for run, workload in product(range(1, num_runs + 1), WORKLOADS):
        stage.on_phase(f"{workload.name}, run {run} of {num_runs}")
        before = server.read_kvpp_counters()
        result = run_client(server.url, setup, workload, seed=run)
        after = server.read_kvpp_counters()
        samples.append(
            Sample(
                round=stage.round_number,
                variant=server.variant.name,
                workload=workload.name,
                **{name: result[key] for name, key in METRICS.items()},
                kvpp_counters={name: after[name] - before[name] for name in after},
            )
        )
    return samples


def compare(samples: Sequence[Sample]) -> Ratios:
    """Divide each variant's metrics by those of KVPP off, run by run: workload, variant, metric."""

    def select(workload: str, variant: str, metric: str) -> list[float]:
        return [getattr(s, metric) for s in samples if (s.workload, s.variant) == (workload, variant)]

    variants = dict.fromkeys(sample.variant for sample in samples)
    return {
        workload.name: {
            variant: {
                metric: paired_ratios(select(workload.name, variant, metric), select(workload.name, OFF.name, metric))
                for metric in METRICS
            }
            for variant in variants
        }
        for workload in WORKLOADS
    }


def make_table(samples: Sequence[Sample], ratios: Ratios, dtype: str) -> ReportTable:
    """Show the medians of all runs, and the ratios."""
    rows = []
    for workload in WORKLOADS:
        for variant in ratios[workload.name]:
            chosen = [s for s in samples if (s.workload, s.variant) == (workload.name, variant)]
            found = ratios[workload.name][variant]
            is_off = variant == OFF.name
            rows.append(
                (
                    f"{workload.name}: {workload.description}",
                    variant,
                    f"{median(s.ttft_ms for s in chosen):,.0f}",
                    "" if is_off else str(found["ttft_ms"]),
                    f"{median(s.tpot_ms for s in chosen):.1f}",
                    "" if is_off else str(found["tpot_ms"]),
                    "" if is_off else f"{median(s.transferred_mb for s in chosen):,.0f}",
                )
            )
    return ReportTable(
        title=f"Latency, KVPP on ÷ off, TP {TP_SIZE}, {MODEL.num_layers} layers, {dtype}",
        columns=("workload", "KVPP", "TTFT ms", "on ÷ off", "TPOT ms", "on ÷ off", "moved, MB a rank"),
        rows=tuple(rows),
        notes=(
            "TTFT: time to first token, median over requests; TPOT: time per output token after the first, mean.",
            "Of several runs the table has the median.",
            "on ÷ off: the median of the runs' ratios (lowest–highest, number of runs).",
        ),
        num_label_columns=2,
    )


def make_setup(folder: Path, *, kv_cache_bytes: int, dtype: str) -> ServerSetup:
    """Write the model into `folder`, and describe the servers."""
    return ServerSetup(
        model_path=write_model(folder / "model", MODEL),
        max_model_len=MODEL.max_model_len,
        tp_size=TP_SIZE,
        kv_cache_bytes=kv_cache_bytes,
        # Without chunked prefill, which vLLM's CPU platform turns off for MLA, a prompt has to fit into a step.
        max_num_batched_tokens=MODEL.max_model_len,
        scratch_dir=folder,
        dtype=dtype,
    )


def main(
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds: each starts a server for each variant.")] = 3,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each workload on each server.")] = 2,
    kv_memory_mib: Annotated[int, typer.Option(min=64, help="KV cache memory of each rank in MiB.")] = 256,
    dtype: Annotated[str, typer.Option(help="Type of the model and its cache: bfloat16, or float32.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this JSON file.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round, one run: to see that it works.")] = False,
) -> None:
    """Measure what KVPP costs in time to first token and time per output token."""
    num_rounds, num_runs = (1, 1) if quick else (repetitions, runs)
    with tempfile.TemporaryDirectory(prefix="kvpp-overhead-") as folder:
        setup = make_setup(Path(folder), kv_cache_bytes=kv_memory_mib * 1024**2, dtype=dtype)
        measure = partial(measure_server, setup=setup, num_runs=num_runs)
        samples = measure_rounds(setup, measure, num_rounds=num_rounds)
    ratios = compare(samples)
    report = BenchmarkReport(
        name="overhead",
        tables=(make_table(samples, ratios, dtype),),
        settings={
            "tp_size": TP_SIZE,
            "model": MODEL,
            "workloads": WORKLOADS,
            "kv_cache_bytes": setup.kv_cache_bytes,
            "dtype": dtype,
            "rounds": num_rounds,
            "runs": num_runs,
            "variants": VARIANTS,
        },
        samples=samples,
        ratios=ratios,
    )
    publish(report, json_path=json_path, markdown_path=markdown_path)


if __name__ == "__main__":
    typer.run(main)
