import os
from collections.abc import Iterator
from typing import Any

import pytest
from mla_cpu_reference import chunked_prefill
from vllm import EngineArgs
from vllm.platforms.cpu import CpuPlatform

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR

ASKED_FOR = {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_batched_tokens": 48}


@pytest.fixture(autouse=True)
def _unchanged_platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    environment = dict(os.environ)
    # Noted for monkeypatch, which then undoes what the part changes.
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", CpuPlatform.__dict__["check_and_update_config"])
    yield
    # vLLM's platform writes variables for its workers.
    os.environ.clear()
    os.environ.update(environment)


def _configure() -> dict[str, Any]:
    arguments = EngineArgs(model=str(CHECKPOINT_DIR), dtype="float32", max_model_len=64, max_num_seqs=4, **ASKED_FOR)
    config = arguments.create_engine_config()
    scheduler, cache = config.scheduler_config, config.cache_config
    return {
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }


def test_the_settings_stay_as_the_user_gave_them() -> None:
    chunked_prefill.apply()
    assert _configure() == ASKED_FOR


def test_without_the_part_the_platform_turns_both_off() -> None:
    settings = _configure()
    assert not settings["enable_chunked_prefill"]
    assert not settings["enable_prefix_caching"]
