"""What a sweep found: ratios of step times, paired by repetition, and the table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from decode_engine import TP_SIZE, Stretch
from ratios import Ratio, paired_ratios
from report import BenchmarkReport, ReportTable
from step_sweep import FULL, OFF, Cell, Samples, SweepResult, SweepSettings
from tiny_model import BLOCK_SIZE, DTYPE, NUM_LAYERS, PAGE_BYTES

NOTHING = "–"
COLUMNS = (
    "blocks in use",
    "transfer",
    "ms per step",
    "moved MB per step",
    "history MB",
    "moved / history",
    "time / off",
    "time / full",
)


def make_report(name: str, title: str, sweep: str, settings: SweepSettings, result: SweepResult) -> BenchmarkReport:
    """Put the sweep together. `sweep` says what differs between its cells, as the head of the first column."""
    samples = result.samples
    ratios = compute_ratios(settings, samples)
    first = settings.cells[0].label
    rows = [
        (cell.label, *_describe_cell(cell, mode, samples), *_describe_ratios(ratios, cell.label, mode))
        for cell in settings.cells
        for mode in settings.all_modes
    ]
    table = ReportTable(
        title=title,
        columns=(sweep, *COLUMNS, f"time / {first}"),
        rows=tuple(rows),
        notes=(_explain(settings),),
        num_label_columns=3,
    )
    return BenchmarkReport(
        name=name,
        tables=(table,),
        settings={**describe_settings(settings), "engines": result.engines},
        samples=list_samples(samples),
        ratios=ratios,
    )


def compute_ratios(settings: SweepSettings, samples: Samples) -> dict[str, dict[str, dict[str, Ratio]]]:
    """Step time over that of KVPP off, of the mode "full", and of the first cell; by cell and mode."""
    first = settings.cells[0].label
    labels = [cell.label for cell in settings.cells]
    modes = settings.all_modes

    def over(label: str, mode: str, other: tuple[str, str]) -> Ratio:
        return paired_ratios(list_step_seconds(samples[label, mode]), list_step_seconds(samples[other]))

    return {
        "over_off": {label: {mode: over(label, mode, (label, OFF)) for mode in settings.modes} for label in labels},
        "over_full": {
            label: {mode: over(label, mode, (label, FULL)) for mode in settings.modes if FULL in modes and mode != FULL}
            for label in labels
        },
        "over_first_cell": {
            label: {mode: over(label, mode, (first, mode)) for mode in modes} for label in labels if label != first
        },
    }


def list_step_seconds(stretches: Sequence[Stretch]) -> list[float]:
    """The median step of each stretch."""
    return [median(stretch.step_seconds) for stretch in stretches]


def _describe_cell(cell: Cell, mode: str, samples: Samples) -> tuple[str, ...]:
    stretches = samples[cell.label, mode]
    moved_bytes = median(stretch.moved_bytes_per_step for stretch in stretches)
    active_bytes = cell.batch.active_bytes
    return (
        f"{cell.batch.num_active_blocks:,} of {cell.num_pool_blocks:,} ({cell.occupancy:.0%})",
        f"KVPP {OFF}" if mode == OFF else mode,
        f"{median(list_step_seconds(stretches)) * 1e3:.1f}",
        NOTHING if mode == OFF else f"{moved_bytes / 1e6:.2f}",
        f"{active_bytes / 1e6:.2f}",
        NOTHING if mode == OFF else f"{moved_bytes / active_bytes:.2f}",
    )


def _describe_ratios(ratios: Mapping[str, Mapping[str, Mapping[str, Ratio]]], label: str, mode: str) -> Iterator[str]:
    for kind in ("over_off", "over_full", "over_first_cell"):
        ratio = ratios[kind].get(label, {}).get(mode)
        yield NOTHING if ratio is None else str(ratio)


def _explain(settings: SweepSettings) -> str:
    blocks = "Blocks are handed out " + ("in a random order." if settings.are_blocks_scattered else "in order.")
    return (
        f"TP {TP_SIZE}, {NUM_LAYERS} layers, {DTYPE}, {settings.cells[0].batch.num_requests} requests. "
        f"ms per step: the median of {settings.num_repetitions} medians of {settings.num_steps} decode steps. "
        "Moved: the bytes that the KVPP group moves in a step, over all layers. History: the bytes of the blocks that "
        "hold the batch's history, over all layers. Ratios: the median of pairs out of the same repetition, in "
        f"brackets the smallest and the largest. 1 MB is 10^6 bytes. {blocks}"
    )


def describe_settings(settings: SweepSettings) -> dict[str, Any]:
    """What was measured, in plain values."""
    cells = [
        {**asdict(cell), "active_bytes": cell.batch.active_bytes, "pool_bytes": cell.pool_bytes}
        for cell in settings.cells
    ]
    model = {"num_layers": NUM_LAYERS, "dtype": DTYPE, "block_size": BLOCK_SIZE, "page_bytes": PAGE_BYTES}
    return {**asdict(settings), "cells": cells, "tp_size": TP_SIZE, "model": model}


def list_samples(samples: Samples) -> list[dict[str, Any]]:
    """Every stretch, in plain values."""
    return [
        {"cell": label, "mode": mode, "repetition": repetition, **asdict(stretch)}
        for (label, mode), stretches in samples.items()
        for repetition, stretch in enumerate(stretches)
    ]
