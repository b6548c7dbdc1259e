"""Decode the same batches with KVPP off and on, in turns, over pools and batches of several sizes.

All engines of a sweep are there at once, and only one works at a time. One repetition goes through every cell and
every mode, so whatever is compared was measured within seconds of each other; every other repetition goes backwards.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from decode_engine import (
    IDLE_SECONDS,
    KV_CACHE_BYTES,
    TP_SIZE,
    Batch,
    DecodeEngine,
    EngineError,
    EngineSettings,
    Stretch,
    run_decode_engine,
)
from rich.console import Console
from tiny_model import NUM_HEADS, NUM_LAYERS, PAGE_BYTES, write_tiny_model

from vllm_kvpp.demo.progress import ProgressReporter

OFF, FULL, ACTIVE, AUTO = "off", "full", "active", "auto"
IN_PLACE, AT_OWNER, BY_TRANSFER, EITHER = "decode in_place", "decode owner", "decode transfer", "decode auto"
# `kvpp.transfer` and `kvpp.decode` of each mode.
MODES = {
    **{mode: (mode, "transfer") for mode in (FULL, ACTIVE, AUTO)},
    IN_PLACE: ("auto", "in_place"),
    AT_OWNER: ("auto", "owner"),
    BY_TRANSFER: ("auto", "transfer"),
    EITHER: ("auto", "auto"),
}
# Measured with vLLM 0.32.0: 1.9 GB for an engine process and its two workers, without the pool.
ENGINE_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: a batch in a pool."""

    label: str
    num_pool_blocks: int
    batch: Batch

    @property
    def occupancy(self) -> float:
        """The share of the pool's blocks that holds the batch's history."""
        return self.batch.num_active_blocks / self.num_pool_blocks

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool's blocks over all layers, as one rank keeps them without KVPP."""
        return self.num_pool_blocks * NUM_LAYERS * PAGE_BYTES


@dataclass(frozen=True)
class SweepSettings:
    """What is measured. `modes` are out of `MODES`, `kvpp` are other options; see also `EngineSettings`."""

    cells: tuple[Cell, ...]
    modes: tuple[str, ...]
    kvpp: Mapping[str, Any]
    num_repetitions: int
    num_warm_up_steps: int
    num_steps: int
    are_blocks_scattered: bool
    num_heads: int = NUM_HEADS
    kv_cache_bytes: int = KV_CACHE_BYTES
    keeps_histories: bool = False

    @property
    def all_modes(self) -> tuple[str, ...]:
        """KVPP off, then the modes."""
        return (OFF, *self.modes)


# By the label of the cell and the mode, one stretch for each repetition.
Samples = dict[tuple[str, str], list[Stretch]]


@dataclass(frozen=True)
class SweepResult:
    """All measurements, and what each engine said of itself: its blocks, and KVPP's report."""

    samples: Samples
    engines: tuple[Mapping[str, Any], ...]


def run_sweep(settings: SweepSettings, stderr: Console) -> SweepResult:
    """Start the engines, measure, and end the engines.

    Raises:
        EngineError: the memory that is free is not enough, or an engine failed.
    """
    _check_memory(settings)
    progress = ProgressReporter(stderr)
    with TemporaryDirectory(prefix="kvpp-bench-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        engines = _start_engines(settings, Path(folder), progress, stack)
        sweep = _Sweep(settings, engines)
        with progress.stage("warm up") as on_phase:
            for cell, mode in sweep.list_turns():
                on_phase(f"{cell.label}, {mode}")
                sweep.measure(cell, mode)
        samples = _repeat(sweep, settings.num_repetitions, progress)
        return SweepResult(samples, tuple(engine.facts for engine in engines.values()))


def _repeat(sweep: "_Sweep", num_repetitions: int, progress: ProgressReporter) -> Samples:
    samples: Samples = {}
    for repetition in range(num_repetitions):
        turns = sweep.list_turns()
        with progress.stage(f"repetition {repetition + 1} of {num_repetitions}"):
            for cell, mode in turns if repetition % 2 == 0 else reversed(turns):
                samples.setdefault((cell.label, mode), []).append(sweep.measure(cell, mode))
    return samples


# By the number of the pool's blocks, and whether KVPP is on.
_Engines = dict[tuple[int, bool], DecodeEngine]


class _Sweep:
    """Takes the engines in turns, with a pause before each that lets the last one fall asleep."""

    def __init__(self, settings: SweepSettings, engines: _Engines) -> None:
        self._settings = settings
        self._engines = engines
        self._last: DecodeEngine | None = None

    def list_turns(self) -> list[tuple[Cell, str]]:
        """One repetition."""
        return [(cell, mode) for cell in self._settings.cells for mode in self._settings.all_modes]

    def measure(self, cell: Cell, mode: str) -> Stretch:
        """Decode the cell's batch in the engine that has its pool."""
        engine = self._engines[cell.num_pool_blocks, mode != OFF]
        if self._last not in (None, engine):
            time.sleep(IDLE_SECONDS)
        self._last = engine
        return engine.measure(
            cell.batch,
            modes=MODES.get(mode),
            num_warm_up_steps=self._settings.num_warm_up_steps,
            num_steps=self._settings.num_steps,
        )


def _start_engines(settings: SweepSettings, folder: Path, progress: ProgressReporter, stack: ExitStack) -> _Engines:
    model = folder / "model"
    model.mkdir()
    write_tiny_model(model, settings.num_heads)
    engines: _Engines = {}
    for number, engine in enumerate(wanted := _list_engines(settings)):
        engine_folder = folder / f"engine-{number}"
        engine_folder.mkdir()
        state = "off" if engine.kvpp is None else "on"
        title = f"start engine {number + 1} of {len(wanted)}: {engine.num_blocks:,} blocks, KVPP {state}"
        with progress.stage(title):
            started = run_decode_engine(engine, model=model, folder=engine_folder)
            engines[engine.num_blocks, engine.kvpp is not None] = stack.enter_context(started)
    return engines


def _list_engines(settings: SweepSettings) -> list[EngineSettings]:
    return [
        EngineSettings(
            num_blocks=num_blocks,
            batches=tuple(cell.batch for cell in settings.cells),
            kvpp=kvpp,
            are_blocks_scattered=settings.are_blocks_scattered,
            kv_cache_bytes=settings.kv_cache_bytes,
            keeps_histories=settings.keeps_histories,
        )
        for num_blocks in dict.fromkeys(cell.num_pool_blocks for cell in settings.cells)
        for kvpp in (None, settings.kvpp)
    ]


def _check_memory(settings: SweepSettings) -> None:
    needed = sum(
        ENGINE_BYTES + TP_SIZE * engine.num_blocks * NUM_LAYERS * PAGE_BYTES for engine in _list_engines(settings)
    )
    available: int = psutil.virtual_memory().available
    if available < needed:
        raise EngineError(
            f"The engines need about {needed / 1e9:.1f} GB of memory, but {available / 1e9:.1f} GB are available. "
            "Free some, or measure fewer cells with --quick."
        )
