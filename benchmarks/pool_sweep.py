"""How the time of a decode step depends on the size of the pool, while the batch stays the same.

Run: .venv/bin/python benchmarks/pool_sweep.py
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

BATCH = Batch(num_requests=4, num_history_tokens=256)
FACTORS = (1, 4, 16)
# The smallest pool just holds the batch.
CELLS = tuple(Cell(f"x{factor}", factor * BATCH.num_active_blocks, BATCH) for factor in FACTORS)


def main(
    repetitions: Repetitions = 7,
    quick: Quick = False,
    with_active: WithActive = False,
    scattered: Scattered = False,
    kvpp: KvppOptions = "{}",
    json_path: JsonFile = None,
    markdown_path: MarkdownFile = None,
) -> None:
    """Decode the same batch in KV pools of 1, 4 and 16 times its size, with KVPP off and on."""
    settings = choose_settings(
        CELLS, repetitions=repetitions, quick=quick, with_active=with_active, scattered=scattered, kvpp=kvpp
    )
    title = "The same batch in pools of growing size"
    run_command("pool_sweep", title, "pool", settings, json_path=json_path, markdown_path=markdown_path)


if __name__ == "__main__":
    typer.run(main)
