"""Engines that several tests look at; each is started once."""

from typing import Any

import pytest
from engine_process import EngineRun, run_engine
from recall_runs import NUM_GENERATED, RECALL_ENGINE, REPORT, Marking, kvpp, kvpp_every_way, rpc
from tokenizers import Tokenizer

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR, RecallQuestion, make_questions


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))


@pytest.fixture(scope="session")
def questions() -> list[RecallQuestion]:
    return [make_questions(1, num_facts, seed=num_facts)[0] for num_facts in (4, 7, 9, 12, 16, 20, 25, 27, 30, 32)]


@pytest.fixture(scope="session")
def workload(tokenizer: Tokenizer, questions: list[RecallQuestion]) -> dict[str, Any]:
    """Requests of different lengths that generate different numbers of tokens."""
    return {
        "kind": "generate",
        "prompts": [tokenizer.encode(question.prompt).ids for question in questions],
        "lengths": [NUM_GENERATED - index for index, _ in enumerate(questions)],
    }


@pytest.fixture(scope="session")
def prefill_only(workload: dict[str, Any]) -> dict[str, Any]:
    return {**workload, "lengths": [1] * len(workload["prompts"])}


@pytest.fixture(scope="session")
def off_run(
    workload: dict[str, Any], prefill_only: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> EngineRun:
    """TP 2, the plugin installed, KVPP off. Actions: workload, prefill only, workload again, description."""
    engine = {**RECALL_ENGINE, "tensor_parallel_size": 2, "additional_config": kvpp(False)}
    actions = [workload, prefill_only, workload, rpc("describe_worker")]
    return run_engine(engine, actions, tmp_path_factory.mktemp("off"))


@pytest.fixture(scope="session")
def on_run(
    workload: dict[str, Any], prefill_only: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> EngineRun:
    """The same with KVPP on, with reports between, and with transfers stopped on purpose at the end."""
    engine = {**RECALL_ENGINE, "tensor_parallel_size": 2, "additional_config": kvpp_every_way(True)}
    every_layer_but_one = [index for index in range(8) if index != 6]
    actions = [
        *(workload, REPORT, prefill_only, REPORT, workload, REPORT, rpc("describe_worker")),
        *(rpc("sabotage_transfers", []), workload),
        *(rpc("sabotage_transfers", every_layer_but_one), workload),
        *(rpc("restore_transfers"), workload),
        *(rpc("set_decode", "owner"), REPORT, workload, REPORT),
        *(rpc("set_decode", "auto"), workload, REPORT),
        *(rpc("set_decode", "owner"), rpc("sabotage_decode"), workload),
        *(rpc("sabotage_decode", 7), workload, rpc("restore_decode"), workload),
        *(rpc("set_decode", "in_place"), REPORT, workload, REPORT),
        *(rpc("sabotage_decode"), workload, rpc("sabotage_decode", 7), workload, rpc("restore_decode"), workload),
    ]
    return run_engine(engine, actions, tmp_path_factory.mktemp("on"))


@pytest.fixture(scope="session")
def default_run(workload: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """TP 2 as a user starts it, with the switch alone. Actions: workload, reports."""
    engine = {**RECALL_ENGINE, "tensor_parallel_size": 2, "additional_config": kvpp(True)}
    return run_engine(engine, [workload, REPORT], tmp_path_factory.mktemp("default"), decode="auto")


@pytest.fixture(scope="session")
def marking(tokenizer: Tokenizer, questions: list[RecallQuestion]) -> Marking:
    return Marking(tokenizer, questions)
