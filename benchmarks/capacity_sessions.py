"""What KVPP gains where the KV cache is too small: conversations of many turns that fit with it, and not without.

Every turn of a conversation repeats all that was said before. As long as the cache holds it, only what is new is
computed; where it has been evicted meanwhile, everything is. All variants get the same memory for the cache.

Run: .venv/bin/python benchmarks/capacity_sessions.py
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import cpu_ranks
import reference_part
import typer
from conversations import Served, Sessions, serve_sessions
from ratios import Ratio, paired_ratios
from report import BenchmarkReport, ReportTable, publish
from servers import MOVED, OFF, ON, ON_FULL, ModelShape, Server, ServerSetup, Stage, measure_rounds, write_model

TP_SIZE = 4
HIDDEN_SIZE = 256
SESSIONS = Sessions(num_sessions=8, num_turns=6, first_prompt_tokens=2048, turn_prompt_tokens=112, output_tokens=16)
MAX_MODEL_LEN = 4096
MAX_NUM_BATCHED_TOKENS = 1024
PLUGINS = (reference_part.PLUGIN, cpu_ranks.NAME)
COUNTERS = {
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "steps": "vllm:iteration_tokens_total_count",
}


VARIANTS = (OFF, ON, ON_FULL)


@dataclass(frozen=True)
class Sample:
    """All conversations, served once; `counters` as the engine counts them, `kvpp_counters` those of one rank."""

    round: int
    variant: str
    capacity_tokens: int
    served: Served
    tokens_per_second: float
    counters: dict[str, float]
    kvpp_counters: dict[str, float]

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that the cache held."""
        return self.counters["prefix_hits"] / self.counters["prefix_queries"]

    @property
    def transferred_gb(self) -> float:
        """What one rank sent and received."""
        return sum(self.kvpp_counters.get(name, 0) for name in MOVED) / 1e9


def measure_server(stage: Stage, server: Server, sessions: Sessions) -> list[Sample]:
    """Warm the server up with a few conversations of the same kind, then serve all."""
    stage.on_phase("warming up")
    serve_sessions(server.url, replace(sessions, num_sessions=2, num_turns=2), seed=0)
    server.forget_prefixes()
    before, kvpp_before = read_counters(server), server.read_kvpp_counters()
    served = serve_sessions(
        server.url, sessions, seed=stage.round_number, on_turn=partial(report_turn, stage, sessions)
    )
    after, kvpp_after = read_counters(server), server.read_kvpp_counters()
    sample = Sample(
        round=stage.round_number,
        variant=server.variant.name,
        capacity_tokens=server.read_cache_size().num_tokens,
        served=served,
        tokens_per_second=served.tokens_per_second,
        counters={name: after[name] - before[name] for name in after},
        kvpp_counters={name: kvpp_after[name] - kvpp_before[name] for name in kvpp_after},
    )
    return [sample]


def report_turn(stage: Stage, sessions: Sessions, num_done: int) -> None:
    """Tell how many turns are done, once for as many as there are sessions."""
    if num_done % sessions.num_sessions == 0:
        stage.on_phase(f"{num_done} of {sessions.num_sessions * sessions.num_turns} turns")


def read_counters(server: Server) -> dict[str, float]:
    """Read what the engine has counted since its start."""
    metrics = server.read_metrics()
    return {name: sum_metric(metrics, metric) for name, metric in COUNTERS.items()}


def sum_metric(metrics: str, name: str) -> float:
    """Add up the lines of one metric of the Prometheus text.

    Raises:
        ValueError: there is no such line.
    """
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    if not values:
        raise ValueError(f"the server has no metric {name}")
    return sum(map(float, values))


def compare(samples: Sequence[Sample]) -> dict[str, Ratio]:
    """Divide the tokens per second of each variant by those of KVPP off, round by round."""
    speeds: dict[str, list[float]] = {}
    for sample in samples:
        speeds.setdefault(sample.variant, []).append(sample.tokens_per_second)
    return {variant: paired_ratios(speeds[variant], speeds[OFF.name]) for variant in speeds}


def make_table(samples: Sequence[Sample], ratios: dict[str, Ratio], sessions: Sessions, title: str) -> ReportTable:
    """Show the medians of all rounds, and the ratios."""
    rows = []
    for variant, ratio in ratios.items():
        chosen = [sample for sample in samples if sample.variant == variant]
        rows.append(
            (
                variant,
                f"{chosen[0].capacity_tokens:,}",
                f"{median(sample.hit_rate for sample in chosen):.0%}",
                f"{median(sample.counters['preemptions'] for sample in chosen):.0f}",
                f"{median(sample.counters['steps'] for sample in chosen):.0f}",
                f"{median(sample.transferred_gb for sample in chosen):,.0f}",
                f"{median(sample.served.seconds for sample in chosen):.0f}",
                f"{median(sample.tokens_per_second for sample in chosen):,.0f}",
                "" if variant == OFF.name else str(ratio),
            )
        )
    return ReportTable(
        title=title,
        columns=(
            "KVPP",
            "tokens that fit",
            "prefix hits",
            "preemptions",
            "steps",
            "moved, GB a rank",
            "seconds",
            "tokens/s",
            "on ÷ off",
        ),
        rows=tuple(rows),
        notes=(
            f"{sessions.num_sessions} conversations of {sessions.num_turns} turns: "
            f"{sessions.first_prompt_tokens:,} prompt tokens first, {sessions.turn_prompt_tokens} more each turn, "
            f"{sessions.output_tokens} output tokens a turn; {sessions.total_tokens:,} tokens at the end.",
            "tokens/s: prompt tokens, cached ones included, and output tokens. Medians of the rounds.",
            "on ÷ off: tokens/s, the median of the rounds' ratios (lowest–highest, number of rounds).",
        ),
    )


def make_setup(folder: Path, model: ModelShape, *, kv_cache_bytes: int) -> ServerSetup:
    """Write the model and the plugin into `folder`, and describe the servers."""
    plugin_dir = folder / "plugins"
    cpu_ranks.write_plugin(plugin_dir)
    return ServerSetup(
        model_path=write_model(folder / "model", model),
        max_model_len=MAX_MODEL_LEN,
        tp_size=TP_SIZE,
        kv_cache_bytes=kv_cache_bytes,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        scratch_dir=folder,
        plugins=PLUGINS,
        plugin_dir=plugin_dir,
        arguments=("--enable-chunked-prefill", "--enable-prefix-caching"),
        environment=reference_part.ENVIRONMENT,
    )


def main(
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds: each starts a server for each variant.")] = 3,
    layers: Annotated[int, typer.Option(min=8, help="Layers of the model.")] = 32,
    kv_memory_mib: Annotated[int, typer.Option(min=64, help="KV cache memory of each rank in MiB.")] = 512,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this JSON file.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round of two turns: to see that it works.")] = False,
) -> None:
    """Measure what more room in the KV cache gains for conversations of many turns."""
    sessions = replace(SESSIONS, num_turns=2) if quick else SESSIONS
    model = ModelShape(layers, HIDDEN_SIZE, 2 * HIDDEN_SIZE, max_model_len=MAX_MODEL_LEN)
    num_rounds = 1 if quick else repetitions
    with tempfile.TemporaryDirectory(prefix="kvpp-sessions-") as folder:
        setup = make_setup(Path(folder), model, kv_cache_bytes=kv_memory_mib * 1024**2)
        samples = measure_rounds(
            setup, partial(measure_server, sessions=sessions), num_rounds=num_rounds, variants=VARIANTS
        )
    ratios = compare(samples)
    title = f"Conversations, {layers} layers, TP {TP_SIZE}, {kv_memory_mib} MiB of KV cache memory a rank"
    report = BenchmarkReport(
        name="capacity_sessions",
        tables=(make_table(samples, ratios, sessions, title),),
        settings={
            "tp_size": TP_SIZE,
            "model": model,
            "sessions": sessions,
            "kv_cache_bytes": setup.kv_cache_bytes,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "rounds": num_rounds,
            "variants": VARIANTS,
        },
        samples=samples,
        ratios=ratios,
    )
    publish(report, json_path=json_path, markdown_path=markdown_path)


if __name__ == "__main__":
    typer.run(main)
