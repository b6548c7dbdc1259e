"""The plan for people, as tables and sentences."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_kvpp.planner.capacity import StageCapacity
from vllm_kvpp.planner.compute import BANDWIDTH_REACHED, OPERATIONS_REACHED
from vllm_kvpp.planner.devices import GIB, LINK_REACHED
from vllm_kvpp.planner.memory import RUNTIME_SHARE
from vllm_kvpp.planner.planning import Plan
from vllm_kvpp.planner.traffic import StepTraffic
from vllm_kvpp.planner.verdict import describe_verdicts

NOTHING = "–"


def make_report(plan: Plan) -> Group:
    """Put together what is printed."""
    parts: list[RenderableType] = [_make_head(plan), Text()]
    for index, stage in enumerate(plan.capacity.stages):
        parts += [_make_rank_table(stage, index, len(plan.capacity.stages)), Text()]
    parts += [_make_capacity_table(plan), Text()]
    if plan.steps:
        parts += [_make_traffic_table(plan), Text()]
    parts += [Text(f"• {line}", style="bold") for line in describe_verdicts(plan)]
    notes = (*plan.notes, *_list_assumptions(plan))
    if notes:
        parts += [Text(), *(Text(f"  {note}", style="dim") for note in notes)]
    return Group(*parts)


def describe_setting(plan: Plan) -> str:
    """How the model is split and its cache stored, in one line."""
    parallelism = plan.parallelism
    groups = f"tp {parallelism.tp_size}"
    if parallelism.pcp_size > 1:
        groups += f" × pcp {parallelism.pcp_size}"
    if len(parallelism.partition) > 1:
        groups += f", pp {len(parallelism.partition)} ({' + '.join(map(str, parallelism.partition))} layers)"
    return f"{groups}, kv-cache-dtype {_name_dtype(plan)}, blocks of {plan.capacity.block_size} tokens"


def _make_head(plan: Plan) -> Text:
    return Text(f"{plan.model.name} ({plan.model.architecture})\n{describe_setting(plan)}\n{_describe_memory(plan)}")


def _name_dtype(plan: Plan) -> str:
    return f"auto ({plan.dtype})" if plan.kv_cache_dtype == "auto" else plan.kv_cache_dtype


def _describe_memory(plan: Plan) -> str:
    if not plan.memories[0].is_estimate:
        return f"KV cache memory of each rank: {_gib(plan.memories[0].available_bytes)} GiB, as given"
    assert plan.device is not None
    lines = [
        f"KV cache memory of each rank{_of_stage(index, len(plan.memories))}: about "
        f"{_gib(memory.available_bytes)} GiB\n"
        f"  (estimate: {plan.options.gpu_memory_utilization:.0%} of {plan.device.memory_gib} GiB, less "
        f"{_gib(memory.weight_bytes or 0)} GiB of weights and {_gib(memory.runtime_bytes or 0)} GiB at run time)"
        for index, memory in enumerate(plan.memories)
    ]
    return "\n".join(lines)


def _of_stage(index: int, num_stages: int) -> str:
    return f" of stage {index}" if num_stages > 1 else ""


def _make_rank_table(stage: StageCapacity, index: int, num_stages: int) -> Table:
    table = Table(title=f"What each rank{_of_stage(index, num_stages)} keeps, bytes per block", title_style="bold")
    for name in ("rank", "owned layers"):
        table.add_column(name)
    for name in ("owned", "draft", "scratch", "total", "blocks"):
        table.add_column(name, justify="right")
    for rank in stage.ranks:
        cost = rank.bytes_per_block
        numbers = (cost.owned, cost.draft, cost.scratch, cost.total, rank.num_blocks)
        table.add_row(str(rank.group_rank), _span(rank.owned_layers), *(f"{number:,}" for number in numbers))
    table.add_section()
    full, blocks = stage.plan.full_bytes_per_block, stage.num_blocks_without
    table.add_row("each", "without KVPP: all", *(NOTHING,) * 3, f"{full:,}", f"{blocks:,}")
    return table


def _make_capacity_table(plan: Plan) -> Table:
    capacity, dcp = plan.capacity, plan.fit_with_dcp
    fits = (plan.fit_without, plan.fit, dcp)
    table = Table(title="What fits", title_style="bold")
    for name in ("", "without KVPP", "with KVPP", f"with DCP {capacity.group_size}"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("tokens", *(f"{fit.num_tokens:,}" if fit else NOTHING for fit in fits))
    dcp_factor = f"{capacity.group_size:.2f}" if dcp is not None else NOTHING
    table.add_row("  times as many", "1", f"{capacity.factor:.2f}", dcp_factor)
    name = f"requests of {plan.options.context:,} tokens"
    table.add_row(name, *(f"{fit.num_requests:,}" if fit else NOTHING for fit in fits))
    table.add_row("longest request", *(f"{fit.longest_request:,}" if fit else NOTHING for fit in fits))
    table.add_row("GiB saved a rank, same tokens", NOTHING, _gib(capacity.saved_bytes), NOTHING)
    return table


def _make_traffic_table(plan: Plan) -> Table:
    title = "What one forward moves"
    if plan.link is not None:
        name = "" if plan.link.is_measured else f"{plan.link.name}, "
        title += f", over {name}{plan.link.gb_s:g} GB/s"
    table = Table(title=title, title_style="bold")
    table.add_column("")
    for traffic in plan.steps:
        step = traffic.step
        requests, tokens = _count(step.num_requests, "request"), _count(step.num_tokens, "new token")
        table.add_column(f"{step.name}, {requests},\n{tokens}", justify="right")
    for row in (*_list_traffic_rows(plan.steps), *_list_in_place_rows(plan), *_list_owner_rows(plan)):
        table.add_row(*row)
    return table


def _list_traffic_rows(steps: Sequence[StepTraffic]) -> tuple[tuple[str, ...], ...]:
    return (
        ("history a request, tokens", *(f"{traffic.step.history:,}" for traffic in steps)),
        ("active blocks only", *(_mb(traffic.active_bytes) for traffic in steps)),
        ("whole layers", *(_mb(traffic.whole_bytes) for traffic in steps)),
        ("moved", *(_mb(traffic.moved_bytes) for traffic in steps)),
        ("time on the link", *(_ms(traffic.transfer_seconds) for traffic in steps)),
        ("compute, estimated", *(_ms(traffic.exposure.compute if traffic.exposure else None) for traffic in steps)),
        ("exposed", *(_ms(traffic.exposure.exposed if traffic.exposure else None) for traffic in steps)),
    )


def _list_in_place_rows(plan: Plan) -> tuple[tuple[str, ...], ...]:
    if not plan.decodes_in_place:
        return ()
    rest = (NOTHING,) * (len(plan.steps) - 1)
    return (("read in place: moved", "0 bytes", *rest), ("  exposed", "0 ms", *rest))


def _list_owner_rows(plan: Plan) -> tuple[tuple[str, ...], ...]:
    decode = plan.owner_decode
    if decode is None:
        return ()
    rest = (NOTHING,) * (len(plan.steps) - 1)
    return (
        ("at the owner instead: moved", _mb(decode.moved_bytes), *rest),
        ("  time on the link", _ms(decode.link_seconds), *rest),
        ("  exposed", _ms(decode.exposed_seconds), *rest),
    )


def _list_assumptions(plan: Plan) -> tuple[str, ...]:
    lines: list[str] = []
    if plan.device is not None:
        lines.append(f"{plan.device.title}: {plan.device.source}.")
    if plan.memories[0].is_estimate:
        lines.append(
            f"Weights are estimated from the configuration; {RUNTIME_SHARE:.0%} of the device is set aside for the run "
            "time. vLLM's start-up log has the real figure: give it as --kv-memory."
        )
    if plan.link is not None and plan.steps:
        reached = "" if plan.link.is_measured else f", of which {LINK_REACHED:.0%} are taken as reached"
        lines.append(f"Link: {plan.link.source}{reached}; all receivers get their copy at that rate.")
    if plan.device is not None and plan.steps:
        lines.append(
            f"Compute: {BANDWIDTH_REACHED:.0%} of the memory rate and {OPERATIONS_REACHED:.0%} of the operations of "
            "the data sheet, without launches and collectives: real layers take longer and hide more."
        )
    if plan.decodes_in_place and plan.steps:
        lines.append(
            "Decode reads in place, and the figures above that row are what transfers would take instead; its one "
            "message a layer is left out. It needs the attention backend CPU_MLA: `vllm-kvpp doctor` says which one a "
            "command line gets."
        )
    if plan.owner_decode is not None and plan.options.transport != "shared-memory":
        lines.append(
            "Decode at the owner needs an attention backend that attends all heads at once. None on a device has been "
            "shown to, so decode moves history there for now."
        )
    return tuple(lines)


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
    return f"{span} ({len(numbers)})"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:,.2f} ms"
