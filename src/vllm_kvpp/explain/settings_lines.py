"""The lines on what was asked for: the arguments, and the engine's configuration."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvpp.explain.log_file import LogLine

ARGUMENTS = "non-default args"
ENGINE = "Initializing a V1 LLM engine"
_BLOCK_SIZE = re.compile(r"(?:kv cache|attention) block size to (\d{1,15})")


@dataclass(frozen=True)
class Settings:
    """The settings that the KV cache depends on; None where the log does not say."""

    vllm_version: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    device: str | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dp_size: int | None = None
    dcp_size: int | None = None
    pcp_size: int | None = None
    block_size: int | None = None
    kv_cache_bytes: int | None = None
    draft_method: str | None = None
    asks_for_kvpp: bool = False


def read_settings(lines: Sequence[LogLine]) -> Settings:
    """Read the settings; where both lines say one, the engine's configuration counts, which vLLM has completed."""
    arguments = _Finder(lines, ARGUMENTS)
    engine = _Finder(lines, ENGINE)
    return Settings(
        vllm_version=engine.find(r"LLM engine \(v([^)\s]+)\)"),
        model=engine.find(r" model='([^']+)'") or arguments.find(r"'model': '([^']+)'"),
        max_model_len=engine.find_int(r"max_seq_len=(\d{1,15})") or arguments.find_int(r"'max_model_len': (\d{1,15})"),
        dtype=engine.find(r"[ ,]dtype=torch\.(\w+)"),
        kv_cache_dtype=engine.find(r"kv_cache_dtype=(\w+)"),
        device=engine.find(r"device_config=(\w+)"),
        tp_size=_find_size(engine, arguments, "tensor"),
        pp_size=_find_size(engine, arguments, "pipeline"),
        dp_size=_find_size(engine, arguments, "data"),
        dcp_size=_find_size(engine, arguments, "decode_context"),
        pcp_size=_find_size(engine, arguments, "prefill_context"),
        block_size=_find_block_size(lines) or arguments.find_int(r"'block_size': (\d{1,15})"),
        kv_cache_bytes=arguments.find_int(r"'kv_cache_memory_bytes': (\d{1,15})"),
        draft_method=engine.find(r"SpeculativeConfig\(method='(\w+)'"),
        asks_for_kvpp=arguments.find(r"'enable_kvpp': '?(True|true|1)\b") is not None,
    )


def _find_size(engine: "_Finder", arguments: "_Finder", kind: str) -> int | None:
    name = f"{kind}_parallel_size"
    return engine.find_int(rf"\b{name}=(\d{{1,15}})") or arguments.find_int(rf"'{name}': (\d{{1,15}})")


def _find_block_size(lines: Sequence[LogLine]) -> int | None:
    found = [match for line in lines if (match := _BLOCK_SIZE.search(line.text))]
    return int(found[-1][1]) if found else None


class _Finder:
    """Looks for settings in the first line that has a mark."""

    def __init__(self, lines: Sequence[LogLine], mark: str) -> None:
        self._text = next((line.text for line in lines if mark in line.text), "")

    def find(self, pattern: str) -> str | None:
        match = re.search(pattern, self._text)
        return match[1] if match is not None else None

    def find_int(self, pattern: str) -> int | None:
        found = self.find(pattern)
        return int(found) if found is not None else None
