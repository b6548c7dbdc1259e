import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_process import EngineRun, run_engine
from hugging_face import largest_logprob_error
from mla_cpu_reference import pipeline_parallel
from recall_runs import RECALL_ENGINE, rpc
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR

needs_engine = [pytest.mark.engine, pytest.mark.slow]

_generator = random.Random(3)
PROMPTS = [[_generator.randrange(4, 132) for _ in range(length)] for length in (20, 33, 48, 90)]


def _load_on(monkeypatch: pytest.MonkeyPatch, *, is_first_rank: bool) -> Any:
    """A runner after `load_model`, whose model makes room for one tensor of `[tokens, 8]`."""
    monkeypatch.setattr(CPUModelRunner, "load_model", lambda self: None)
    monkeypatch.setattr(pipeline_parallel, "get_pp_group", lambda: SimpleNamespace(is_first_rank=is_first_rank))
    pipeline_parallel.apply()
    model = SimpleNamespace(
        make_empty_intermediate_tensors=lambda batch_size, dtype, device: {
            "hidden_states": torch.zeros(batch_size, 8, dtype=dtype, device=device)
        }
    )
    runner = SimpleNamespace(
        model=model,
        max_num_tokens=32,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        device=torch.device("cpu"),
        intermediate_tensors=None,
    )
    CPUModelRunner.load_model(runner)
    return runner


def test_a_later_stage_has_room_for_the_largest_batch_once_its_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_states = _load_on(monkeypatch, is_first_rank=False).intermediate_tensors["hidden_states"]
    assert hidden_states.shape == (32, 8)
    assert hidden_states.dtype == torch.bfloat16


def test_the_first_stage_receives_nothing_and_has_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _load_on(monkeypatch, is_first_rank=True).intermediate_tensors is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    engine = {
        **RECALL_ENGINE,
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        # Less than the longest prompt, so that it comes in chunks.
        "max_num_batched_tokens": 64,
    }
    actions = [{"kind": "generate", "prompts": PROMPTS, "lengths": [8, 10, 12, 14]}, rpc("digest_caches")]
    return run_engine(
        engine,
        actions,
        tmp_path_factory.mktemp("run"),
        reference=["pipeline_parallel", "chunked_prefill"],
        environment={"VLLM_PP_LAYER_PARTITION": "5,3"},
    )


class TestTwoUnevenStagesOfTwoRanks:
    pytestmark = needs_engine

    def test_their_logprobs_are_those_of_the_hugging_face_model(self, run: EngineRun) -> None:
        assert largest_logprob_error(CHECKPOINT_DIR, PROMPTS, run.answers(0)) < 1e-4

    def test_each_stage_has_the_caches_of_its_own_layers(self, run: EngineRun) -> None:
        assert [len(caches) for caches in run.actions[1]] == [5, 5, 3, 3]
