"""The command line: `vllm-kvpp demo`."""

from pathlib import Path
from typing import Annotated

import typer

from vllm_kvpp import __version__
from vllm_kvpp.demo.app import DemoOptions
from vllm_kvpp.demo.command import run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"vllm-kvpp {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keep each MLA layer's KV cache on one tensor-parallel rank instead of all: a plugin for vLLM."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    tp: Annotated[int, typer.Option(min=2, help="Tensor parallel size: ranks, and CPUs needed.")] = 2,
    questions: Annotated[int, typer.Option(min=2, max=256, help="Questions to ask each server.")] = 24,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the servers; else a free one.")] = None,
    kv_memory_mib: Annotated[int, typer.Option(min=16, help="KV cache memory of each rank in MiB.")] = 256,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until a server has to be ready, or answer.")] = 180,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the servers' logs here.")] = None,
) -> None:
    """Serve a small model on this machine's CPUs with KVPP and without it, and compare memory and answers.

    Takes one to three minutes. Needs a CPU build of vLLM, and no network.
    """
    options = DemoOptions(
        tp_size=tp,
        num_questions=questions,
        kv_cache_bytes=kv_memory_mib * 1024**2,
        timeout_seconds=timeout,
        port=port,
    )
    raise typer.Exit(run_command(options, as_json=json, log_dir=log_dir))
