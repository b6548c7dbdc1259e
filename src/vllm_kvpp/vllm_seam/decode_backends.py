"""Which attention backends can attend to an owner's memory in decode, and why the others cannot: the one list.

An owner calls `forward_mqa` with the queries of all heads of the group, where the backend expects those of one rank. To
read in place, every rank calls it with its own queries, and the owner's cache instead of its own.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from vllm_kvpp.errors import KVPPConfigError

# A backend that is not vLLM's own says so by this attribute of its implementation, with a true value.
DECLARATION = "kvpp_attends_all_heads"
DIFFERENT_TOKENS = "ranks of prefill context parallelism have different tokens"
NO_SHARED_MEMORY = "the ranks do not share memory"
NOT_ON_DEVICES = f"{NO_SHARED_MEMORY}, which only ranks on CPUs do"


@dataclass(frozen=True)
class DecodeBackend:
    """One backend by the name that vLLM gives it; `obstacle` is None if it attends any number of heads.

    `reads_in_place` says that it reads what `forward_mqa` is given and nothing else, does not write there, and has been
    run so.
    """

    name: str
    head_count: str
    obstacle: str | None
    reads_in_place: bool = False


_FROM_QUERY = "from the query"
_NOT_RUN = "nobody has run it with all heads yet"

DECODE_BACKENDS: tuple[DecodeBackend, ...] = (
    DecodeBackend("CPU_MLA", _FROM_QUERY, None, reads_in_place=True),
    # Its kernel gives each head the same bits, whatever the others are, as tests hold in Triton's interpreter.
    DecodeBackend("TRITON_MLA", f"{_FROM_QUERY}; on devices a workspace is reserved for one rank's heads", None),
    DecodeBackend("AMX_MLA", "num_heads of the implementation", "its output has room for one rank's heads"),
    DecodeBackend(
        "FLASHMLA",
        "num_q_heads of the metadata builder, in the tile schedule",
        "its tiles are scheduled for one rank's heads",
    ),
    DecodeBackend(
        "FLASH_ATTN_MLA",
        "num_heads of the metadata builder, in the schedule",
        "its work is scheduled for one rank's heads",
    ),
    DecodeBackend("FLASHINFER_MLA", f"{_FROM_QUERY}, and chooses the kernel by it", _NOT_RUN),
    DecodeBackend("CUTLASS_MLA", f"{_FROM_QUERY}, padded to 128", "its queries are padded to 128 heads on each rank"),
    DecodeBackend(
        "ROCM_AITER_MLA",
        "num_heads of the metadata builder, in the schedule",
        "its work is scheduled for one rank's heads",
    ),
    DecodeBackend("AITER_TRITON_MLA", "as ROCM_AITER_MLA", _NOT_RUN),
    DecodeBackend("TOKENSPEED_MLA", "not looked at", _NOT_RUN),
    DecodeBackend("FLASHMLA_SPARSE", "num_heads of the builder and the implementation, padded", _NOT_RUN),
    DecodeBackend("FLASH_ATTN_MLA_SPARSE", "not looked at", _NOT_RUN),
    DecodeBackend("FLASH_ATTN_MLA_SPARSE_FA4", "not looked at (from vLLM 0.33)", _NOT_RUN),
    DecodeBackend("FLASHINFER_MLA_SPARSE", "not looked at", _NOT_RUN),
    DecodeBackend("FLASHINFER_MLA_SPARSE_SM90", "not looked at", _NOT_RUN),
    DecodeBackend("FLASHINFER_MLA_SPARSE_SM120", "not looked at", _NOT_RUN),
    DecodeBackend("ROCM_AITER_MLA_SPARSE", "not looked at", _NOT_RUN),
    DecodeBackend("XPU_MLA_SPARSE", "not looked at", _NOT_RUN),
)

_BY_NAME = {backend.name: backend for backend in DECODE_BACKENDS}


def list_able_backends() -> tuple[str, ...]:
    """The names of vLLM's backends that can."""
    return tuple(backend.name for backend in DECODE_BACKENDS if backend.obstacle is None)


def find_obstacle(attentions: Collection[Any], *, prefill_context_parallel_size: int, on_cpu: bool) -> str | None:
    """Say why decode rows cannot attend at the owner in these attention modules, or None if they can.

    Touches: `MLAAttention` and its attributes `attn_backend`, `impl`, `num_heads`, `head_size`, `kv_lora_rank`.
    Because: see `symbols.py`. Checked by: `check_seam`, and here for each layer.
    """
    if (obstacle := _find_common_obstacle(attentions, prefill_context_parallel_size)) is not None:
        return obstacle
    for attention in attentions:
        if (obstacle := find_backend_obstacle(attention.attn_backend, attention.impl, on_cpu=on_cpu)) is not None:
            return obstacle
    shapes = {(attention.num_heads, attention.head_size, attention.kv_lora_rank) for attention in attentions}
    return "its layers have different heads" if len(shapes) > 1 else None


def find_in_place_obstacle(
    attentions: Collection[Any], *, prefill_context_parallel_size: int, shares_memory: bool, on_cpu: bool
) -> str | None:
    """Say why decode rows cannot read an owner's memory in place in these attention modules, or None if they can."""
    if not shares_memory:
        return NO_SHARED_MEMORY if on_cpu else NOT_ON_DEVICES
    if (obstacle := _find_common_obstacle(attentions, prefill_context_parallel_size)) is not None:
        return obstacle
    obstacles = (find_in_place_backend_obstacle(attention.attn_backend) for attention in attentions)
    return next((obstacle for obstacle in obstacles if obstacle is not None), None)


def _find_common_obstacle(attentions: Collection[Any], prefill_context_parallel_size: int) -> str | None:
    if prefill_context_parallel_size > 1:
        return DIFFERENT_TOKENS
    if not attentions:
        return "this stage has no attention layer"
    foreign = (type(attention) for attention in attentions if type(attention).forward is not MLAAttention.forward)
    first = next(foreign, None)
    return None if first is None else f"{first.__name__} attends in a way of its own"


def find_in_place_backend_obstacle(backend: Any) -> str | None:
    """Say why a backend cannot read another rank's memory."""
    name = backend.get_name()
    if name in _BY_NAME and _BY_NAME[name].reads_in_place:
        return None
    return f"attention backend {name}: nobody has run it on another rank's memory yet"


def find_backend_obstacle(backend: Any, implementation: Any, *, on_cpu: bool) -> str | None:
    """Say why a backend cannot attend all heads at once; `implementation` is its class or an instance of that."""
    if getattr(implementation, DECLARATION, False):
        return None
    name = backend.get_name()
    if name not in _BY_NAME:
        obstacle: str | None = "KVPP does not know it"
    elif name == "TRITON_MLA" and not on_cpu:
        obstacle = "its workspace is reserved for one rank's heads on devices"
    else:
        obstacle = _BY_NAME[name].obstacle
    return None if obstacle is None else f"attention backend {name}: {obstacle}"


def make_refusal(obstacle: str) -> KVPPConfigError:
    """The error for `kvpp.decode` `owner` where something stands in its way."""
    return KVPPConfigError(
        [
            f"Decode tokens cannot attend at the owner. ({obstacle}; set kvpp.decode to auto or transfer, or "
            f"choose one of the attention backends {', '.join(list_able_backends())} with --attention-backend)"
        ]
    )


def make_in_place_refusal(obstacle: str) -> KVPPConfigError:
    """The error for `kvpp.decode` `in_place` where something stands in its way."""
    return KVPPConfigError(
        [
            f"Decode tokens cannot read the owner's memory in place. ({obstacle}; set kvpp.decode to auto, owner or "
            "transfer)"
        ]
    )
