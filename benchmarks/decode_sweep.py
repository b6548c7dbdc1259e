"""How the time of a decode step depends on its way to the history: read in place, attended at the owner, or moved.

Run: .venv/bin/python benchmarks/decode_sweep.py
"""

from statistics import median
from typing import Annotated

import typer
from decode_engine import TP_SIZE, Batch
from ratios import Ratio, paired_ratios
from report import BenchmarkReport, ReportTable, publish
from step_report import NOTHING, describe_settings, list_samples, list_step_seconds
from step_sweep import (
    AT_OWNER,
    BY_TRANSFER,
    EITHER,
    IN_PLACE,
    OFF,
    Cell,
    Samples,
    SweepSettings,
)
from sweep_command import (
    NUM_STEPS,
    NUM_WARM_UP_STEPS,
    QUICK_REPETITIONS,
    JsonFile,
    MarkdownFile,
    Repetitions,
    run_or_exit,
)
from tiny_model import BLOCK_SIZE, DTYPE, NUM_HEADS, NUM_LAYERS, PAGE_BYTES

# Requests, and histories in tokens.
SHAPES = dict.fromkeys((1, 4, 32), (64, 1024, 4096, 8192))
BATCHES = tuple(Batch(num_requests, tokens) for num_requests, lengths in SHAPES.items() for tokens in lengths)
# Room for all histories at once, and some more: the longest of each request, with which its shorter ones begin.
NUM_POOL_BLOCKS = max(batch.num_requests * batch.num_history_tokens for batch in BATCHES) // BLOCK_SIZE + 128
CELLS = tuple(Cell(f"{batch.num_requests} × {batch.num_history_tokens:,}", NUM_POOL_BLOCKS, batch) for batch in BATCHES)
QUICK_CELLS = tuple(cell for cell in CELLS if cell.label in ("1 × 64", "4 × 1,024"))
# Of each rank, with room for what KVPP keeps beside the caches.
KV_CACHE_BYTES = 2 * NUM_POOL_BLOCKS * NUM_LAYERS * PAGE_BYTES
FIXED_MODES = (IN_PLACE, AT_OWNER, BY_TRANSFER)
MODES = (*FIXED_MODES, EITHER)
COLUMNS = (
    "requests × history",
    "decode",
    "ms per step",
    "moved MB per step",
    "time / off",
    "time / best one",
    "÷ at 64",
)


def main(
    repetitions: Repetitions = 5,
    heads: Annotated[int, typer.Option(min=TP_SIZE, help="Attention heads of the model, of all ranks.")] = NUM_HEADS,
    requests: Annotated[int | None, typer.Option(help="Only the batches of so many requests: 1, 4 or 32.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only two cells, two repetitions.")] = False,
    json_path: JsonFile = None,
    markdown_path: MarkdownFile = None,
) -> None:
    """Decode batches of 1 to 32 requests with 64 to 8,192 tokens of history, with KVPP off, and in each decode mode.

    Computing the histories takes most of the warm-up; each engine does it once.
    """
    if heads % TP_SIZE:
        raise typer.BadParameter(f"--heads is {heads}; it has to be a multiple of {TP_SIZE}.")
    cells = QUICK_CELLS if quick else CELLS
    known = dict.fromkeys(cell.batch.num_requests for cell in cells)
    if requests is not None and requests not in known:
        raise typer.BadParameter(f"--requests is {requests}; it has to be {' or '.join(map(str, known))}, or left out.")
    settings = SweepSettings(
        cells=tuple(cell for cell in cells if requests in (None, cell.batch.num_requests)),
        modes=MODES,
        # So that the ranks keep memory for queries; the modes are switched between stretches.
        kvpp={"decode": "owner"},
        num_repetitions=min(repetitions, QUICK_REPETITIONS) if quick else repetitions,
        num_warm_up_steps=NUM_WARM_UP_STEPS,
        num_steps=NUM_STEPS,
        are_blocks_scattered=True,
        num_heads=heads,
        kv_cache_bytes=KV_CACHE_BYTES,
        keeps_histories=True,
    )
    result = run_or_exit(settings)
    ratios = compute_ratios(settings, result.samples)
    report = BenchmarkReport(
        name="decode_sweep",
        tables=(make_table(settings, result.samples, ratios),),
        settings={**describe_settings(settings), "engines": result.engines},
        samples=list_samples(result.samples),
        ratios=ratios,
    )
    publish(report, json_path=json_path, markdown_path=markdown_path)


# By kind, cell and mode.
Ratios = dict[str, dict[str, dict[str, Ratio]]]


def compute_ratios(settings: SweepSettings, samples: Samples) -> Ratios:
    """Step time over that of KVPP off, over the best of the fixed modes, and the first over its value at 64."""
    over_off: dict[str, dict[str, Ratio]] = {}
    over_best: dict[str, dict[str, Ratio]] = {}
    growth: dict[str, dict[str, Ratio]] = {}
    for cell in settings.cells:
        seconds = {mode: list_step_seconds(samples[cell.label, mode]) for mode in settings.all_modes}
        over_off[cell.label] = {mode: paired_ratios(seconds[mode], seconds[OFF]) for mode in MODES}
        best = list(map(min, zip(*(seconds[mode] for mode in FIXED_MODES), strict=True)))
        over_best[cell.label] = {EITHER: paired_ratios(seconds[EITHER], best)}
        shortest = Cell(f"{cell.batch.num_requests} × 64", cell.num_pool_blocks, cell.batch).label
        if shortest in over_off and shortest != cell.label:
            growth[cell.label] = {
                mode: paired_ratios(_list_ratios(samples, cell.label, mode), _list_ratios(samples, shortest, mode))
                for mode in MODES
            }
    return {"over_off": over_off, "over_best": over_best, "over_shortest": growth}


def _list_ratios(samples: Samples, label: str, mode: str) -> list[float]:
    pairs = zip(list_step_seconds(samples[label, mode]), list_step_seconds(samples[label, OFF]), strict=True)
    return [above / below for above, below in pairs]


def make_table(settings: SweepSettings, samples: Samples, ratios: Ratios) -> ReportTable:
    """One row for each cell and mode."""
    rows = [
        (
            cell.label,
            f"KVPP {OFF}" if mode == OFF else mode.removeprefix("decode "),
            f"{median(list_step_seconds(samples[cell.label, mode])) * 1e3:.1f}",
            NOTHING if mode == OFF else f"{_moved_bytes(samples, cell.label, mode) / 1e6:.2f}",
            *(str(ratios[kind].get(cell.label, {}).get(mode, NOTHING)) for kind in ratios),
        )
        for cell in settings.cells
        for mode in settings.all_modes
    ]
    return ReportTable(
        title="Decode in place, at the owner and by transfer",
        columns=COLUMNS,
        rows=tuple(rows),
        notes=(
            f"TP {TP_SIZE}, {NUM_LAYERS} layers, {settings.num_heads} heads, {DTYPE}. ms per step: the median of "
            f"{settings.num_repetitions} medians of {settings.num_steps} decode steps. Moved: history, queries and "
            "outputs, over all layers, as rank 0 counts them. Ratios: the median of pairs out of the same repetition, "
            "in brackets the smallest and the largest; ÷ at 64: the ratio to off over that of 64 tokens of history. "
            "Blocks are handed out in a random order.",
        ),
        num_label_columns=2,
    )


def _moved_bytes(samples: Samples, label: str, mode: str) -> float:
    return median(stretch.moved_bytes_per_step for stretch in samples[label, mode])


if __name__ == "__main__":
    typer.run(main)
