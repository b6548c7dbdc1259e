"""The reference part `runner_v2`: vLLM's model runner V2 on CPU computes what V1 does."""

from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineRun, run_engine
from recall_runs import RECALL_ENGINE
from tokenizers import Tokenizer

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR, make_questions

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_FACTS = (4, 12, 20, 32)


@pytest.fixture(scope="module")
def workload() -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    prompts = [tokenizer.encode(make_questions(1, count, seed=count)[0].prompt).ids for count in NUM_FACTS]
    return {"kind": "generate", "prompts": prompts, "lengths": [12, 10, 8, 6]}


def _run(workload: dict[str, Any], folder: Path, reference: list[str]) -> EngineRun:
    return run_engine({**RECALL_ENGINE, "tensor_parallel_size": 2}, [workload], folder, reference=reference)


@pytest.fixture(scope="module")
def v1_run(workload: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    return _run(workload, tmp_path_factory.mktemp("v1"), [])


@pytest.fixture(scope="module")
def v2_run(workload: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    return _run(workload, tmp_path_factory.mktemp("v2"), ["runner_v2"])


def test_each_run_has_the_runner_that_it_asked_for(v1_run: EngineRun, v2_run: EngineRun) -> None:
    assert "Using V2 Model Runner" in v2_run.log
    assert "Using V2 Model Runner" not in v1_run.log


def test_v2_generates_the_tokens_of_v1_with_the_same_logprobs(v1_run: EngineRun, v2_run: EngineRun) -> None:
    for v1, v2 in zip(v1_run.answers(0), v2_run.answers(0), strict=True):
        assert v2.token_ids == v1.token_ids
        for ours, theirs in zip(v2.logprobs, v1.logprobs, strict=True):
            assert _as_numbers(ours) == pytest.approx(_as_numbers(theirs), abs=1e-4)


def _as_numbers(logprobs: dict[str, str]) -> dict[str, float]:
    return {token: float.fromhex(value) for token, value in logprobs.items()}
