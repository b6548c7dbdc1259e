"""From what the user asked to the finished plan."""

from dataclasses import dataclass, replace

from vllm_kvpp.plan.cache_forms import CacheForm
from vllm_kvpp.planner.cache_dtype import resolve_cache_dtype
from vllm_kvpp.planner.cache_specs import (
    DTYPES,
    KV_CACHE_DTYPES,
    PACKED,
    choose_latent_form,
    list_stage_caches,
)
from vllm_kvpp.planner.capacity import Capacity, Transport, plan_capacity
from vllm_kvpp.planner.compute import ComputeEstimate, Step
from vllm_kvpp.planner.config_file import read_config
from vllm_kvpp.planner.decode import OwnerDecode, describe_queries, find_in_place_obstacle, plan_owner_decode
from vllm_kvpp.planner.devices import Device, Link, find_device, find_link
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.memory import StageMemory, estimate_memory, parse_memory
from vllm_kvpp.planner.model import MLAModel, read_model
from vllm_kvpp.planner.parallel import Parallelism, split_model
from vllm_kvpp.planner.traffic import StepTraffic, plan_traffic
from vllm_kvpp.planner.weights import read_weights
from vllm_kvpp.selection import DecodeMode, QueryShape, TransferMode


@dataclass(frozen=True)
class PlanOptions:
    """What `vllm-kvpp plan` was asked, as typed."""

    model: str
    tp_size: int = 8
    pcp_size: int = 1
    pp_size: int = 1
    pp_partition: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 64
    kv_memory: str | None = None
    gpu: str | None = None
    gpu_memory_utilization: float = 0.92
    draft: str | None = None
    context: int = 32_768
    num_requests: int = 1
    num_batched_tokens: int = 8192
    link: str | None = None
    transfer: TransferMode = "auto"
    decode: DecodeMode = "auto"
    transport: Transport = "broadcast"


@dataclass(frozen=True)
class Fit:
    """What some number of blocks holds: tokens, the longest single request, and requests of the asked length.

    No request is longer than what the model was made for.
    """

    num_tokens: int
    longest_request: int
    num_requests: int


@dataclass(frozen=True)
class Plan:
    """Everything that is printed; `decodes_in_place` says that decode moves nothing, whatever `steps` would move."""

    options: PlanOptions
    model: MLAModel
    parallelism: Parallelism
    dtype: str
    kv_cache_dtype: str
    device: Device | None
    link: Link | None
    memories: tuple[StageMemory, ...]
    capacity: Capacity
    dcp_refusal: str | None
    steps: tuple[StepTraffic, ...]
    decodes_in_place: bool
    owner_decode: OwnerDecode | None
    notes: tuple[str, ...]

    @property
    def fit(self) -> Fit:
        """What fits with KVPP."""
        return self._find_fit(self.capacity.num_blocks, self.capacity.block_size)

    @property
    def fit_without(self) -> Fit:
        """What fits without KVPP."""
        return self._find_fit(self.capacity.num_blocks_without, self.capacity.block_size)

    @property
    def fit_with_dcp(self) -> Fit | None:
        """What fits with DCP as wide as the group, None where vLLM has none.

        Every rank keeps its share of a request's tokens, of all layers.
        """
        if self.dcp_refusal is not None:
            return None
        capacity = self.capacity
        return self._find_fit(capacity.num_blocks_without, capacity.block_size * capacity.group_size)

    def _find_fit(self, num_blocks: int, tokens_of_a_block: int) -> Fit:
        # vLLM holds one block back.
        usable = max(num_blocks - 1, 0)
        longest = usable * tokens_of_a_block
        return Fit(
            num_tokens=num_blocks * tokens_of_a_block,
            longest_request=min(longest, self.model.largest_length or longest),
            num_requests=usable // -(-self.options.context // tokens_of_a_block),
        )


def make_plan(options: PlanOptions) -> Plan:
    """Plan a deployment.

    Raises:
        PlannerError: in one line, what cannot be planned and what would do.
    """
    _check_names(options)
    return plan_model(read_model(read_config(options.model)), options)


def plan_model(model: MLAModel, options: PlanOptions) -> Plan:
    """Plan a deployment of a model that has been read, whatever `options.model` says.

    Raises:
        PlannerError: as `make_plan`.
    """
    device = find_device(options.gpu) if options.gpu is not None else None
    parallelism = split_model(
        model,
        tp_size=options.tp_size,
        pcp_size=options.pcp_size,
        pp_size=options.pp_size,
        partition=options.pp_partition,
    )
    decodes_in_place = _decide_in_place(options, model, parallelism)
    kv_cache_dtype, notes = resolve_cache_dtype(options.kv_cache_dtype, model, device)
    dtype = model.dtype if options.dtype == "auto" else options.dtype
    latent = choose_latent_form(model, kv_cache_dtype, dtype)
    queries = describe_queries(model, parallelism, dtype) if _keeps_exchange(options, decodes_in_place) else None
    memories, capacity = _plan_memory(options, model, parallelism, device, latent, queries)
    plan = Plan(
        options=options,
        model=model,
        parallelism=parallelism,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        link=_choose_link(options.link, device),
        memories=memories,
        capacity=capacity,
        dcp_refusal=_refuse_dcp(model, kv_cache_dtype),
        steps=(),
        decodes_in_place=decodes_in_place,
        owner_decode=None,
        notes=(*model.notes, *notes),
    )
    return replace(plan, steps=plan_steps(plan), owner_decode=_plan_owner_decode(plan))


def plan_steps(plan: Plan) -> tuple[StepTraffic, ...]:
    """What a decode step and a prefill chunk move and how long that takes, with the context that `plan.options` has."""
    compute = _estimate_compute(plan)
    return tuple(
        plan_traffic(plan.capacity, step, plan.options.transfer, link=plan.link, compute=compute)
        for step in _list_steps(plan)
    )


def _decide_in_place(options: PlanOptions, model: MLAModel, parallelism: Parallelism) -> bool:
    """Whether decode reads the owners' memory in place: wherever it can, unless another way is asked for."""
    obstacle = find_in_place_obstacle(model, parallelism, options.transport)
    if obstacle is not None and options.decode == "in_place":
        raise PlannerError(f"--decode is in_place, but {obstacle}.")
    return obstacle is None and options.decode in ("auto", "in_place")


def _keeps_exchange(options: PlanOptions, decodes_in_place: bool) -> bool:
    """Whether ranks keep memory for decode queries: if asked, and on CPUs if decode cannot read in place."""
    if options.decode == "auto":
        return options.transport == "shared-memory" and not decodes_in_place
    return options.decode == "owner"


def _plan_owner_decode(plan: Plan) -> OwnerDecode | None:
    queries = describe_queries(plan.model, plan.parallelism, plan.dtype)
    if queries is None or plan.options.decode == "transfer":
        return None
    compute = _estimate_compute(plan)
    decode_steps = [step for step in _list_steps(plan) if step.is_decode]
    if not decode_steps:
        return None
    return plan_owner_decode(plan.capacity, plan.model, queries, decode_steps[0], link=plan.link, compute=compute)


def _plan_memory(
    options: PlanOptions,
    model: MLAModel,
    parallelism: Parallelism,
    device: Device | None,
    latent: CacheForm,
    queries: QueryShape | None,
) -> tuple[tuple[StageMemory, ...], Capacity]:
    stages = list_stage_caches(
        model,
        parallelism.partition,
        block_size=options.block_size,
        latent=latent,
        has_drafts=options.draft is not None,
    )
    memories = _find_memory(options, model, parallelism, device, [stage.layers for stage in stages])
    capacity = plan_capacity(
        stages,
        [memory.available_bytes for memory in memories],
        block_size=options.block_size,
        group_size=parallelism.group_size,
        transfer=options.transfer,
        transport=options.transport,
        queries=queries,
    )
    return memories, capacity


def _check_names(options: PlanOptions) -> None:
    if options.kv_memory is None and options.gpu is None:
        raise PlannerError("No memory is given; use --kv-memory with that of one rank, like 46.8GiB, or --gpu.")
    if options.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise PlannerError(
            f"--kv-cache-dtype is {options.kv_cache_dtype[:40]!r}, which the plan does not know; use "
            f"{', '.join(KV_CACHE_DTYPES)}."
        )
    if options.dtype != "auto" and options.dtype not in DTYPES:
        raise PlannerError(f"--dtype is {options.dtype[:40]!r}; use auto, {', '.join(DTYPES)}.")
    if options.gpu is not None:
        find_device(options.gpu)
    if options.draft not in (None, "mtp"):
        raise PlannerError(f"--draft is {str(options.draft)[:40]!r}; the plan knows mtp only, or leave it out.")


def _choose_link(name: str | None, device: Device | None) -> Link | None:
    if name is not None:
        return find_link(name)
    return find_link(device.link) if device is not None else None


def _find_memory(
    options: PlanOptions, model: MLAModel, parallelism: Parallelism, device: Device | None, stages: list[range]
) -> tuple[StageMemory, ...]:
    if options.kv_memory is not None:
        return tuple(StageMemory(parse_memory(options.kv_memory)) for _ in stages)
    assert device is not None, "neither memory nor a device"
    return estimate_memory(
        device,
        options.gpu_memory_utilization,
        read_weights(model),
        stages,
        tp_size=parallelism.tp_size,
        num_drafts=model.num_draft_layers if options.draft else 0,
    )


def _estimate_compute(plan: Plan) -> ComputeEstimate | None:
    if plan.device is None:
        return None
    latent = choose_latent_form(plan.model, plan.kv_cache_dtype, plan.dtype)
    weights = read_weights(plan.model)
    return ComputeEstimate(plan.device, plan.model, weights, plan.parallelism.tp_size, latent.bytes_per_token)


def _refuse_dcp(model: MLAModel, kv_cache_dtype: str) -> str | None:
    if model.indexer is not None and kv_cache_dtype != PACKED:
        return f"not with sparse attention and this cache type; vLLM's FlashMLA backend needs {PACKED}"
    return None


def _list_steps(plan: Plan) -> tuple[Step, ...]:
    """A decode step of the requests that run at once, and a chunk of a prefill behind the same history."""
    running = min(plan.options.num_requests, plan.fit.num_requests)
    if running == 0:
        return ()
    chunk = plan.options.num_batched_tokens
    return (
        Step("decode", running, tokens_each=1, history=plan.options.context),
        Step("prefill chunk", 1, tokens_each=chunk, history=plan.options.context),
    )
