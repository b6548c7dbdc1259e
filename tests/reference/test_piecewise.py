import os
from collections.abc import Iterator
from typing import Any

import pytest
from mla_cpu_reference import piecewise
from vllm import EngineArgs
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode
from vllm.platforms.cpu import CpuPlatform

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR

CUTS = {"vllm::unified_mla_kv_cache_update", "vllm::unified_mla_attention_with_output"}


@pytest.fixture
def _applied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    environment = dict(os.environ)
    # Noted for monkeypatch, which then undoes what the part changes.
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", CpuPlatform.__dict__["check_and_update_config"])
    monkeypatch.setattr(FixFunctionalizationPass, "__call__", FixFunctionalizationPass.__call__)
    piecewise.apply()
    yield
    # vLLM's platform writes variables for its workers.
    os.environ.clear()
    os.environ.update(environment)


def _configure(*, enable_lora: bool = False, **compilation: Any) -> CompilationConfig:
    arguments = EngineArgs(
        model=str(CHECKPOINT_DIR),
        dtype="float32",
        max_model_len=64,
        enable_lora=enable_lora,
        compilation_config=compilation,
    )
    return arguments.create_engine_config().compilation_config


@pytest.mark.usefixtures("_applied")
@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_the_model_is_cut_at_cache_update_and_attention(backend: str) -> None:
    compilation = _configure(mode=3, backend=backend, cudagraph_mode="PIECEWISE")
    assert compilation.mode == CompilationMode.VLLM_COMPILE
    assert compilation.backend == backend
    assert set(compilation.splitting_ops) >= CUTS


@pytest.mark.usefixtures("_applied")
def test_no_fusion_for_devices_is_asked_for() -> None:
    passes = _configure(mode=3, custom_ops=["all"]).pass_config
    assert not [name for name, value in vars(passes).items() if name.startswith(("fuse_", "enable_")) and value]


@pytest.mark.usefixtures("_applied")
def test_no_size_is_compiled_for_alone_unless_the_user_names_it() -> None:
    assert _configure(mode=3).compile_sizes == []
    assert _configure(mode=3, compile_sizes=[4]).compile_sizes == [4]


@pytest.mark.usefixtures("_applied")
@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.DYNAMO_TRACE_ONCE])
def test_other_modes_stay_as_they_were(mode: CompilationMode) -> None:
    assert _configure(mode=int(mode)).mode == mode


@pytest.mark.usefixtures("_applied")
def test_adapters_are_still_run_without_compilation() -> None:
    assert _configure(mode=3, enable_lora=True).mode == CompilationMode.NONE
