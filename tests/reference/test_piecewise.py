import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from engine_process import NATIVE_ROPE, EngineRun, run_engine
from hugging_face import largest_logprob_error
from mla_cpu_reference import piecewise
from recall_runs import RECALL_ENGINE, rpc
from vllm import EngineArgs
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode
from vllm.platforms.cpu import CpuPlatform

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR

needs_engine = [pytest.mark.engine, pytest.mark.slow]

NUM_LAYERS = 8
CUTS = {"vllm::unified_mla_kv_cache_update", "vllm::unified_mla_attention_with_output"}
_generator = random.Random(3)
PROMPTS = [[_generator.randrange(4, 132) for _ in range(length)] for length in (20, 33, 90)]


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


@pytest.fixture(scope="module", params=["eager", "inductor"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    engine = {
        **RECALL_ENGINE,
        "tensor_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 3, "backend": request.param, **NATIVE_ROPE},
        "worker_extension_cls": "compile_probe.CompileProbe",
        # Less than the longest prompt, so that it comes in chunks.
        "max_num_batched_tokens": 64,
    }
    actions = [
        {"kind": "generate", "prompts": PROMPTS, "lengths": [8, 10, 12]},
        rpc("count_graphs"),
        rpc("describe_compilation"),
    ]
    return run_engine(
        engine,
        actions,
        tmp_path_factory.mktemp("run"),
        reference=["piecewise", "chunked_prefill"],
        # What another run has left would hide whether this one compiles.
        environment={"VLLM_DISABLE_COMPILE_CACHE": "1"},
    )


class TestTwoRanksWithCompiledPieces:
    pytestmark = needs_engine

    def test_their_logprobs_are_those_of_the_hugging_face_model(self, run: EngineRun) -> None:
        assert largest_logprob_error(CHECKPOINT_DIR, PROMPTS, run.answers(0)) < 1e-4

    def test_every_layer_is_cut_twice_and_every_piece_is_compiled(self, run: EngineRun) -> None:
        for graphs, settings in zip(run.actions[1], run.actions[2], strict=True):
            num_cuts = graphs["num_piecewise_graphs_seen"] - graphs["num_piecewise_capturable_graphs_seen"]
            assert num_cuts == 2 * NUM_LAYERS
            assert graphs["num_backend_compilations"] == graphs["num_piecewise_capturable_graphs_seen"] > NUM_LAYERS
            assert graphs[f"num_{settings['backend']}_compiles"] > 0
