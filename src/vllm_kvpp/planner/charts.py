"""What the charts of `--plot` show, as points: the asked plan made anew for other groups, ranks and contexts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from vllm_kvpp.planner.cache_specs import StageCaches
from vllm_kvpp.planner.capacity import Capacity, StageCapacity, plan_capacity
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.planning import Plan, plan_model, plan_steps
from vllm_kvpp.planner.traffic import StepTraffic

# Charts go on to twice what was asked, and at least to here; with more ranks they leave some sizes out.
MOST_RANKS = 16
FIRST_CONTEXT, MOST_CONTEXT = 1024, 131_072

Found = TypeVar("Found")
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Line:
    """One line of a chart: points from left to right, and which of them is the plan that was asked for."""

    name: str
    points: Points
    asked: tuple[float, float] | None


@dataclass(frozen=True)
class Chart:
    """Lines over one axis; `remark` says what they leave out, or why there are none."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    remark: str = ""
    has_log_x: bool = False
    has_log_y: bool = False


def make_charts(plan: Plan) -> tuple[Chart, ...]:
    """The factor against the group size, tokens against TP, and exposed time against the context."""
    return (_chart_factor(plan), _chart_tokens(plan), _chart_time(plan))


def _chart_factor(plan: Plan) -> Chart:
    asked = plan.capacity.group_size
    most = min(max(MOST_RANKS, 2 * asked), *(len(stage.layers) for stage in plan.capacity.stages))
    sizes = sorted({asked, *range(2, most + 1, -(-most // MOST_RANKS))})
    regrouped = _try_each(sizes, lambda size: _regroup(plan, size))
    lines = [_draw_line("KVPP", asked, [(size, capacity.factor) for size, capacity in regrouped])]
    if plan.dcp_refusal is None:
        lines.append(_draw_line("DCP", asked, [(size, float(size)) for size, _ in regrouped]))
    return Chart(
        title="Tokens in the same memory",
        x_label="group size (TP × PCP), ranks",
        y_label="times as many tokens as without KVPP",
        lines=tuple(lines),
        remark="with the memory of the asked plan",
    )


def _chart_tokens(plan: Plan) -> Chart:
    asked, heads = plan.options.tp_size, plan.model.num_heads
    sizes = [size for size in range(1, max(MOST_RANKS, 2 * asked) + 1) if heads % size == 0]
    plans = _try_each(sizes, lambda size: plan_model(plan.model, replace(plan.options, tp_size=size)))
    lines = [
        _draw_line("KVPP", asked, [(size, found.fit.num_tokens) for size, found in plans]),
        _draw_line("without KVPP", asked, [(size, found.fit_without.num_tokens) for size, found in plans]),
    ]
    if plan.dcp_refusal is None:
        # None of the plans refuses it: a refusal follows from the model and the type of its cache.
        fits = [(size, found.fit_with_dcp) for size, found in plans]
        lines.append(_draw_line("DCP", asked, [(size, fit.num_tokens) for size, fit in fits if fit is not None]))
    return Chart(
        title="Tokens that fit",
        x_label="tensor parallel size, ranks",
        y_label="tokens",
        lines=tuple(lines),
        remark="memory of each rank estimated for each size" if plan.memories[0].is_estimate else "same memory a rank",
    )


def _chart_time(plan: Plan) -> Chart:
    asked = plan.options.context
    last = max(MOST_CONTEXT, 2 * asked)
    contexts = sorted({asked, *_double(FIRST_CONTEXT, min(last, plan.model.largest_length or last))})
    planned = [(context, _plan_steps(plan, context)) for context in contexts]
    steps = [(context, found) for context, found in planned if found]
    is_exposed = plan.device is not None
    lines = [
        _draw_line(name, asked, [(context, _milliseconds(found[index])) for context, found in steps])
        for index, name in _name_moving_steps(plan)
    ]
    has_times = plan.link is not None
    return Chart(
        title="Exposed time of one forward" if is_exposed else "Time of one forward on the link",
        x_label="history of each request, tokens",
        y_label="ms exposed" if is_exposed else "ms on the link",
        lines=tuple(line for line in lines if line.points) if has_times else (),
        remark=_describe_time(plan, has_lines=has_times and any(line.points for line in lines)),
        has_log_x=True,
        has_log_y=True,
    )


def _plan_steps(plan: Plan, context: int) -> tuple[StepTraffic, ...]:
    return plan_steps(replace(plan, options=replace(plan.options, context=context)))


def _describe_time(plan: Plan, *, has_lines: bool) -> str:
    if plan.link is None:
        return "unknown: give --link, and --gpu for what compute hides"
    if not has_lines:
        return "no request fits"
    name = f"{plan.link.gb_s:g} GB/s" if plan.link.is_measured else f"{plan.link.name}, {plan.link.gb_s:g} GB/s"
    known = f"estimate, over {name}" if plan.device is not None else f"over {name}; give --gpu for what compute hides"
    return f"{known}; decode reads in place" if plan.decodes_in_place else known


def _name_moving_steps(plan: Plan) -> tuple[tuple[int, str], ...]:
    """The steps that move history, as positions and names."""
    options = plan.options
    requests = "1 request" if options.num_requests == 1 else f"up to {options.num_requests:,} requests"
    prefill = (1, f"prefill chunk, {options.num_batched_tokens:,} tokens")
    return (prefill,) if plan.decodes_in_place else ((0, f"decode, {requests}"), prefill)


def _milliseconds(traffic: StepTraffic) -> float:
    seconds = traffic.exposure.exposed if traffic.exposure is not None else traffic.transfer_seconds
    return (seconds or 0.0) * 1e3


def _regroup(plan: Plan, group_size: int) -> Capacity:
    """The asked plan's caches and memory in groups of another size."""
    stages, options = plan.capacity.stages, plan.options
    return plan_capacity(
        [_recover_caches(stage) for stage in stages],
        [stage.available_bytes for stage in stages],
        block_size=plan.capacity.block_size,
        group_size=group_size,
        transfer=options.transfer,
        transport=options.transport,
    )


def _recover_caches(stage: StageCapacity) -> StageCaches:
    targets = tuple(cache for bundle in stage.plan.bundles for cache in bundle.components)
    drafts = stage.plan.draft_caches
    return StageCaches(stage.layers, (*targets, *drafts), frozenset(cache.name for cache in drafts))


def _try_each(sizes: Iterable[int], make: Callable[[int], Found]) -> list[tuple[int, Found]]:
    """What can be planned of all sizes: some are too small for the model, some too large."""
    found: list[tuple[int, Found]] = []
    for size in sizes:
        try:
            found.append((size, make(size)))
        except PlannerError:
            continue
    return found


def _draw_line(name: str, asked: int, points: Sequence[tuple[float, float]]) -> Line:
    return Line(name, tuple(points), next((point for point in points if point[0] == asked), None))


def _double(first: int, last: int) -> Iterable[int]:
    while first <= last:
        yield first
        first *= 2
