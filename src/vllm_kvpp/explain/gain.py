"""What KVPP would give the deployment of a log: the planner's answer, with what had to be assumed for it."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_kvpp.deployment import Deployment, Speculation, find_refusals
from vllm_kvpp.explain.errors import ExplainError
from vllm_kvpp.explain.settings_lines import Settings
from vllm_kvpp.explain.startup import Startup
from vllm_kvpp.planner.config_file import list_catalogue, read_config
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.planning import Plan, PlanOptions, make_plan

CPU_BLOCK_SIZE = 16
USUAL_BLOCK_SIZE = 64


@dataclass(frozen=True)
class Hints:
    """What the user says beside the log: a model's configuration, the TP size, tokens of a block."""

    model: str | None = None
    tp_size: int | None = None
    block_size: int | None = None


@dataclass(frozen=True)
class Gain:
    """A plan for the deployment, or the reason why there is none."""

    plan: Plan | None
    refusal: str | None = None
    assumptions: tuple[str, ...] = ()


def plan_gain(startup: Startup, hints: Hints) -> Gain:
    """Plan what the same ranks would hold with KVPP.

    Raises:
        ExplainError: the model that the user named cannot be planned.
    """
    settings = startup.settings
    _check_model(hints)
    model, assumptions = _find_model(settings, hints)
    tp_size = hints.tp_size or settings.tp_size
    memory = _find_memory(startup)
    if refusal := _refuse(settings, tp_size) or _find_what_is_missing(settings, model, tp_size, memory):
        return Gain(None, refusal)
    assert model is not None
    assert tp_size is not None
    assert memory is not None
    block_size, block_assumptions = find_block_size(startup, hints)
    options = PlanOptions(
        model=model,
        tp_size=tp_size,
        pcp_size=settings.pcp_size or 1,
        pp_size=settings.pp_size or 1,
        dtype=settings.dtype or "auto",
        kv_cache_dtype=settings.kv_cache_dtype or "auto",
        block_size=block_size,
        kv_memory=memory,
        draft=settings.draft_method and "mtp",
        context=settings.max_model_len or PlanOptions.context,
        transport="shared-memory" if settings.device == "cpu" else "broadcast",
    )
    try:
        plan = make_plan(options)
    except PlannerError as error:
        return Gain(None, " ".join(str(error).split()))
    return Gain(plan, None, (*assumptions, *block_assumptions, *plan.notes))


def find_block_size(startup: Startup, hints: Hints) -> tuple[int, tuple[str, ...]]:
    """Tokens of a block, and the assumption where neither the log nor the user says it."""
    said = hints.block_size or startup.settings.block_size or _block_size_of_kvpp(startup)
    if said:
        return said, ()
    # vLLM's CPU backend for MLA knows one size only.
    assumed = CPU_BLOCK_SIZE if startup.settings.device == "cpu" else USUAL_BLOCK_SIZE
    return assumed, (f"The log does not say the block size; {assumed} tokens are assumed (see --block-size).",)


def _block_size_of_kvpp(startup: Startup) -> int | None:
    return next((rank.block_size for rank in startup.kvpp.ranks if rank.block_size), None)


def _find_memory(startup: Startup) -> str | None:
    """Memory of one rank as the planner reads it; what was given in bytes is exact, what was logged is rounded."""
    if startup.settings.kv_cache_bytes:
        return f"{startup.settings.kv_cache_bytes}b"
    smallest = startup.smallest_memory
    return f"{smallest.gib}gib" if smallest is not None else None


def _check_model(hints: Hints) -> None:
    if hints.model is None:
        return
    try:
        read_config(hints.model)
    except PlannerError as error:
        raise ExplainError(str(error).replace("MODEL", "--model", 1)) from error


def _find_model(settings: Settings, hints: Hints) -> tuple[str | None, tuple[str, ...]]:
    """A model that can be read without a network: as given, a folder, or a name of the catalogue."""
    if hints.model is not None or settings.model is None:
        return hints.model, ()
    if _is_on_disk(settings.model):
        return settings.model, ()
    wanted = {settings.model.lower(), PurePosixPath(settings.model).name.lower()}
    for name in list_catalogue():
        if name.lower() == settings.model.lower():
            return name, ()
        if wanted & {name.lower(), name.rpartition("/")[2].lower()}:
            return name, (f"The model is taken for {name} by its name (see --model).",)
    return None, ()


def _is_on_disk(model: str) -> bool:
    try:
        return Path(model).exists()
    except (OSError, ValueError):
        return False


def _refuse(settings: Settings, tp_size: int | None) -> str | None:
    """What the log alone shows to be refused, in the words of the refusal."""
    if tp_size == 1 and (settings.pcp_size or 1) == 1:
        return "the group has 1 rank (tensor_parallel_size is 1), so KVPP has no effect; use 2 or more."
    deployment = Deployment(
        tensor_parallel_size=tp_size or 1,
        decode_context_parallel_size=settings.dcp_size or 1,
        speculation=Speculation(settings.draft_method) if settings.draft_method else None,
    )
    return " ".join(find_refusals(deployment)) or None


def _find_what_is_missing(settings: Settings, model: str | None, tp_size: int | None, memory: str | None) -> str | None:
    if model is None and settings.model is not None:
        return (
            f"the configuration of {settings.model} is neither on this machine nor in the catalogue; give it as "
            "--model CONFIG."
        )
    missing = (
        ("the model; give it as --model CONFIG", model),
        ("tensor_parallel_size; give it as --tp", tp_size),
        ("the KV cache memory of a rank; look for a line like 'Available KV cache memory'", memory),
    )
    return next((f"the log does not say {what}." for what, value in missing if value is None), None)
