"""The explanation for people: a table of the figures, and sentences."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_kvpp.explain.explanation import Explanation
from vllm_kvpp.explain.sentences import describe_kvpp, describe_relation, describe_scope

MOST_ROWS = 16


def make_report(explanation: Explanation) -> Group:
    """Put together what is printed."""
    parts: list[RenderableType] = [_make_head(explanation), Text(), _make_table(explanation)]
    sections = (
        ("What the figures are of", describe_scope(explanation)),
        ("Tokens and concurrency", describe_relation(explanation)),
        ("KVPP", describe_kvpp(explanation)),
    )
    for title, lines in sections:
        if lines:
            parts += [Text(), Text(title, style="bold"), *_list(lines)]
    if explanation.notes:
        parts += [Text(), *(Text(f"  {note}", style="dim") for note in explanation.notes)]
    return Group(*parts)


def _list(lines: Sequence[str]) -> Iterator[RenderableType]:
    for line in lines:
        row = Table.grid(padding=(0, 1))
        row.add_row(Text("•"), Text(line))
        yield row


def _make_head(explanation: Explanation) -> Text:
    settings = explanation.startup.settings
    said = (
        ("vLLM", settings.vllm_version),
        ("model", settings.model),
        ("tp", settings.tp_size),
        ("pp", _above_one(settings.pp_size)),
        ("dp", _above_one(settings.dp_size)),
        ("dtype", settings.dtype),
        ("kv-cache-dtype", settings.kv_cache_dtype),
    )
    return Text(", ".join(f"{name} {value}" for name, value in said if value is not None) or explanation.source)


def _above_one(size: int | None) -> int | None:
    return size if size is not None and size > 1 else None


def _make_table(explanation: Explanation) -> Table:
    table = Table(title="What the log says", title_style="bold")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("is of")
    rows = list(_list_rows(explanation))
    for row in rows[:MOST_ROWS]:
        table.add_row(*row)
    if len(rows) > MOST_ROWS:
        table.add_row("…", f"{len(rows) - MOST_ROWS:,} more", "")
    return table


def _list_rows(explanation: Explanation) -> Iterator[tuple[str, str, str]]:
    for memory in explanation.startup.memories:
        yield "KV cache memory", f"{memory.gib:g} GiB", f"one rank: {_name(memory.rank)}"
    for pool in explanation.startup.pools:
        scope = f"the whole engine: {_name(pool.engine)}"
        if pool.num_tokens is not None:
            yield "KV cache size", f"{pool.num_tokens:,} tokens", scope
        if pool.concurrency is not None and pool.max_model_len is not None:
            yield f"requests of {pool.max_model_len:,} tokens", f"{pool.concurrency:,.2f}", scope
    if explanation.blocks is not None:
        blocks = explanation.blocks
        yield "blocks (worked back)", f"{blocks.num_blocks:,} of {blocks.block_size} tokens", "every rank, the same"


def _name(process: str) -> str:
    return process.partition(" pid=")[0] or "not named"
