"""The plan in sentences: what KVPP gives here, what it costs, and whether DCP would serve better."""

from vllm_kvpp.planner.planning import Plan
from vllm_kvpp.planner.traffic import StepTraffic

# Below this share of a step, what is exposed would drown in what the estimate leaves out.
SMALL_SHARE = 0.01


def describe_verdicts(plan: Plan) -> tuple[str, ...]:
    """One sentence a finding."""
    return (_describe_gain(plan), *_describe_traffic(plan), *_compare_with_dcp(plan))


def _describe_gain(plan: Plan) -> str:
    capacity = plan.capacity
    if capacity.factor <= 1:
        return (
            f"KVPP does not pay here: it holds {capacity.factor:.2f} times as many tokens, as two scratch layers cost "
            "more than the layers that a rank gives away."
        )
    return f"KVPP holds {capacity.factor:.2f} times as many tokens in the same memory."


def _describe_traffic(plan: Plan) -> tuple[str, ...]:
    if not plan.steps:
        return (f"No request of {plan.options.context:,} tokens fits; lower --context or raise the memory.",)
    return tuple(_describe_step(plan, traffic) for traffic in plan.steps)


def _describe_step(plan: Plan, traffic: StepTraffic) -> str:
    name = f"{traffic.step.name.capitalize()} at {traffic.step.history:,} tokens of history"
    if plan.decodes_in_place and traffic.step.is_decode:
        return f"{name}: every rank reads the owners' memory in place, so nothing is moved."
    return f"{name}: {_describe_time(traffic)}"


def _describe_time(traffic: StepTraffic) -> str:
    if traffic.transfer_seconds is None:
        return "the time is unknown; give --link, and --gpu for what compute hides."
    if traffic.exposure is None:
        return f"{_ms(traffic.transfer_seconds)} ms on the link; give --gpu to see what compute hides."
    exposure = traffic.exposure
    share = f"of {_ms(exposure.compute + exposure.exposed)} ms a step"
    if exposure.is_hidden:
        return f"hidden but for the first layer, {_ms(exposure.exposed)} ms {share} (estimate)."
    if exposure.exposed < SMALL_SHARE * exposure.compute:
        return f"as good as hidden, exposed by {_ms(exposure.exposed)} ms {share} (estimate)."
    return f"exposed by {_ms(exposure.exposed)} ms {share} (estimate)."


def _compare_with_dcp(plan: Plan) -> tuple[str, ...]:
    fit = plan.fit_with_dcp
    if fit is None:
        return (f"DCP: {plan.dcp_refusal}.",)
    ratio = fit.num_tokens / plan.fit.num_tokens
    return (
        f"DCP {plan.capacity.group_size} would hold {ratio:.2f} times as many as KVPP; it moves queries and partial "
        "results instead of history. The two cannot be combined.",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
