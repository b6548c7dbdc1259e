"""The switch and its options, read from vLLM's `additional_config` (R-CFG-1)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from vllm_kvpp.errors import KVPPConfigError
from vllm_kvpp.selection import DecodeMode, TransferMode

SWITCH = "enable_kvpp"
OPTIONS = "kvpp"
MIB = 1024 * 1024


def _refuse_bool(value: Any) -> Any:
    # pydantic takes true for 1.
    if isinstance(value, bool):
        raise ValueError("input should be a number, not a boolean")
    return value


class KVPPOptions(BaseModel):
    """Options under the key `kvpp` of `additional_config`; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transfer: TransferMode = Field(
        default="auto",
        description="What a step moves: every allocated block, the blocks of the batch's history, or what is cheaper.",
        json_schema_extra={"valid": "auto, full, or active"},
    )
    decode: DecodeMode = Field(
        default="auto",
        description="How decode tokens reach their history: every rank reads the owner's memory in place, their "
        "queries go to the owner, or the history is moved to every rank.",
        json_schema_extra={"valid": "auto, in_place, owner, or transfer"},
    )
    transport: Literal["auto", "broadcast"] = Field(
        default="auto",
        description="How bytes travel: through shared memory where all ranks allow it, or always by broadcast.",
        json_schema_extra={"valid": "auto or broadcast"},
    )
    staging_mib: Annotated[int | None, BeforeValidator(_refuse_bool)] = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Memory of each rank through which scattered blocks travel, out of the KV cache memory.",
        json_schema_extra={"valid": "1 to 65536, in MiB"},
    )
    transfer_timeout_seconds: Annotated[float, BeforeValidator(_refuse_bool)] = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="How long one layer's transfer, or what decode waits for, may take before it counts as lost.",
        json_schema_extra={"valid": "above 0, up to 86400"},
    )

    @property
    def staging_bytes(self) -> int | None:
        """The staging memory asked for; None if KVPP is to choose."""
        return None if self.staging_mib is None else self.staging_mib * MIB


@dataclass(frozen=True)
class KVPPSettings:
    """What the user asked for."""

    is_enabled: bool = False
    options: KVPPOptions = field(default_factory=KVPPOptions)


def read_settings(additional_config: Mapping[str, Any]) -> KVPPSettings:
    """Read the switch and the options.

    Raises:
        KVPPConfigError: with every value that is not understood, named as typed.
    """
    reasons: list[str] = []
    is_enabled = _read_switch(additional_config, reasons)
    options = _read_options(additional_config, reasons)
    if reasons:
        raise KVPPConfigError(reasons)
    return KVPPSettings(is_enabled=is_enabled, options=options)


def _read_switch(additional_config: Mapping[str, Any], reasons: list[str]) -> bool:
    value = additional_config.get(SWITCH, False)
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        reasons.append(f"{SWITCH} is {value!r}, which is not a boolean; use true or false.")
        return False


def _read_options(additional_config: Mapping[str, Any], reasons: list[str]) -> KVPPOptions:
    value = additional_config.get(OPTIONS, {})
    known = ", ".join(KVPPOptions.model_fields)
    if not isinstance(value, Mapping):
        reasons.append(f"{OPTIONS} is {value!r}; it has to be an object with keys out of: {known}.")
        return KVPPOptions()
    try:
        options = KVPPOptions.model_validate(dict(value))
    except ValidationError as error:
        reasons += [_describe_problem(str(problem["loc"][0]), problem, known) for problem in error.errors()]
        return KVPPOptions()
    if options.transfer == "full" and options.staging_mib is not None:
        reasons.append(
            f"{OPTIONS}.staging_mib is {options.staging_mib}, but whole layers need no staging memory; leave it out, "
            f"or set {OPTIONS}.transfer to auto or active."
        )
    if options.decode == "in_place" and options.transport == "broadcast":
        reasons.append(
            f"{OPTIONS}.decode is in_place, but with {OPTIONS}.transport broadcast no rank reads another's memory; set "
            f"{OPTIONS}.transport to auto, or {OPTIONS}.decode to auto, owner or transfer."
        )
    return options


def _describe_problem(key: str, problem: Mapping[str, Any], known: str) -> str:
    if problem["type"] == "extra_forbidden":
        return f"{OPTIONS}.{key} is not an option; the known ones are: {known}."
    extra = KVPPOptions.model_fields[key].json_schema_extra
    assert isinstance(extra, dict)
    return f"{OPTIONS}.{key} is {problem['input']!r}: {problem['msg']}. (valid: {extra['valid']})"
