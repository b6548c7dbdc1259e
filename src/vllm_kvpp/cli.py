"""The command line: `vllm-kvpp plan`, `demo`, `doctor` and `explain`. Each command loads its own part when it runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_kvpp import __version__

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
    from vllm_kvpp.demo.app import DemoOptions
    from vllm_kvpp.demo.command import run_command

    options = DemoOptions(
        tp_size=tp,
        num_questions=questions,
        kv_cache_bytes=kv_memory_mib * 1024**2,
        timeout_seconds=timeout,
        port=port,
    )
    raise typer.Exit(run_command(options, as_json=json, log_dir=log_dir))


@app.command()
def plan(  # noqa: PLR0913, PLR0917 - one parameter an option
    model: Annotated[str, typer.Argument(help="Folder, config.json, name of the catalogue, or a hub's owner/name.")],
    tp: Annotated[int, typer.Option(min=1, max=1024, help="Tensor parallel size.")] = 8,
    pcp: Annotated[int, typer.Option(min=1, max=1024, help="Prefill context parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, max=512, help="Pipeline parallel size.")] = 1,
    pp_partition: Annotated[str | None, typer.Option(help="Layers of each stage, like 38,40; else vLLM's.")] = None,
    dtype: Annotated[str, typer.Option(help="Type that the model runs in; auto is the checkpoint's.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, fp8, … or fp8_ds_mla.")] = "auto",
    block_size: Annotated[int, typer.Option(min=1, max=65536, help="Tokens of one block.")] = 64,
    kv_memory: Annotated[str | None, typer.Option(help="KV cache memory of one rank, like 46.8GiB.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Device, to estimate memory and compute: h200, b200, 910b, …")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the device that vLLM may use.")] = 0.92,
    draft: Annotated[str | None, typer.Option(help="mtp, to count the model's own draft layers.")] = None,
    context: Annotated[int, typer.Option(min=1, max=10**9, help="Tokens of each request.")] = 32768,
    requests: Annotated[int, typer.Option(min=1, max=10**6, help="Requests that run at once.")] = 1,
    max_num_batched_tokens: Annotated[int, typer.Option(min=2, max=10**6, help="Tokens of a prefill chunk.")] = 8192,
    link: Annotated[str | None, typer.Option(help="Link of the group, like nvlink-h100 or pcie5, or GB/s.")] = None,
    transfer: Annotated[Literal["auto", "active", "full"], typer.Option(help="As kvpp.transfer.")] = "auto",
    decode: Annotated[Literal["auto", "in_place", "owner", "transfer"], typer.Option(help="As kvpp.decode.")] = "auto",
    transport: Annotated[
        Literal["broadcast", "shared-memory"], typer.Option(help="shared-memory for CPUs of one host.")
    ] = "broadcast",
    plot: Annotated[Path | None, typer.Option(help="Draw charts into this .svg, .png or .html file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Compute what KVPP gives and costs for a model on a machine, before anything is deployed.

    Needs no GPU, no vLLM and no network, but for a model of a hub. Give the memory of each rank with --kv-memory, or a
    device with --gpu.
    """
    from vllm_kvpp.planner.command import run_command
    from vllm_kvpp.planner.planning import PlanOptions

    options = PlanOptions(
        model=model,
        tp_size=tp,
        pcp_size=pcp,
        pp_size=pp,
        pp_partition=pp_partition,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        kv_memory=kv_memory,
        gpu=gpu,
        gpu_memory_utilization=gpu_memory_utilization,
        draft=draft,
        context=context,
        num_requests=requests,
        num_batched_tokens=max_num_batched_tokens,
        link=link,
        transfer=transfer,
        decode=decode,
        transport=transport,
    )
    raise typer.Exit(run_command(options, as_json=json, plot=plot))


@app.command(context_settings={"allow_interspersed_args": False})
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="A server's command line, like: -- vllm serve MODEL ...", metavar="-- COMMAND"),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until vLLM has to have answered.")] = 180,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Check the installation, and what KVPP would do with a `vllm serve` command line, without starting it.

    Exit code 0: nothing stands in KVPP's way, or it is off. 1: something would stop it (vLLM missing or not proven, a
    symbol missing, the plugin not loaded), or the command line is refused. 2: the command line cannot be read.
    """
    from vllm_kvpp.doctor.command import run_command

    raise typer.Exit(run_command(command or (), timeout_seconds=timeout, as_json=json))


@app.command()
def explain(
    logfile: Annotated[str, typer.Argument(help="Output of a vLLM server's start, or - for the standard input.")],
    model: Annotated[str | None, typer.Option(help="The model, as for plan, if the log's is not found.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, max=1024, help="Tensor parallel size, if the log lacks it.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, max=65536, help="Tokens of a block, if it lacks it.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Say what the KV cache lines of a vLLM start-up log mean, and what KVPP would change.

    Needs no vLLM. Exit code 0, or 2 if LOGFILE cannot be explained.
    """
    from vllm_kvpp.explain.command import run_command
    from vllm_kvpp.explain.gain import Hints

    raise typer.Exit(run_command(logfile, Hints(model=model, tp_size=tp, block_size=block_size), as_json=json))
