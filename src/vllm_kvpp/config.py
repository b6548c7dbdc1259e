"""The switch and its options, read from vLLM's `additional_config` (R-CFG-1)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from vllm_kvpp.errors import KVPPConfigError

SWITCH = "enable_kvpp"
OPTIONS = "kvpp"


def _refuse_bool(value: Any) -> Any:
    # pydantic takes true for 1.
    if isinstance(value, bool):
        raise ValueError("input should be a number, not a boolean")
    return value


class KVPPOptions(BaseModel):
    """Options under the key `kvpp` of `additional_config`; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transfer_timeout_seconds: Annotated[float, BeforeValidator(_refuse_bool)] = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="How long one layer's transfer may take before it counts as lost.",
    )


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
        return KVPPOptions.model_validate(dict(value))
    except ValidationError as error:
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                reasons.append(f"{OPTIONS}.{key} is not an option; the known ones are: {known}.")
            else:
                reasons.append(f"{OPTIONS}.{key} is {problem['input']!r}: {problem['msg']}.")
        return KVPPOptions()
