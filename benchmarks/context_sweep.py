"""How the time of a decode step depends on the history of the batch, while the pool stays the same.

Run: .venv/bin/python benchmarks/context_sweep.py
"""

import typer
from decode_engine import Batch
from step_sweep import Cell
from sweep_command import (
    JsonFile,
    KvppOptions,
    MarkdownFile,
    Quick,
    Repetitions,
    Scattered,
    WithActive,
    choose_settings,
    run_command,
)
from tiny_model import BLOCK_SIZE

NUM_REQUESTS = 4
FACTORS = (1, 4, 16, 64)
BATCHES = tuple(Batch(NUM_REQUESTS, factor * BLOCK_SIZE) for factor in FACTORS)
# The largest batch fills the pool.
NUM_POOL_BLOCKS = BATCHES[-1].num_active_blocks
CELLS = tuple(Cell(f"x{factor}", NUM_POOL_BLOCKS, batch) for factor, batch in zip(FACTORS, BATCHES, strict=True))


def main(
    repetitions: Repetitions = 7,
    quick: Quick = False,
    with_active: WithActive = False,
    scattered: Scattered = False,
    kvpp: KvppOptions = "{}",
    json_path: JsonFile = None,
    markdown_path: MarkdownFile = None,
) -> None:
    """Decode batches with 16, 64, 256 and 1024 tokens of history a request in one KV pool, with KVPP off and on."""
    settings = choose_settings(
        CELLS, repetitions=repetitions, quick=quick, with_active=with_active, scattered=scattered, kvpp=kvpp
    )
    title = "Histories of growing length in the same pool"
    run_command("context_sweep", title, "history", settings, json_path=json_path, markdown_path=markdown_path)


if __name__ == "__main__":
    typer.run(main)
