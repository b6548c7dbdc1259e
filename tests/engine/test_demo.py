"""The demo as a user runs it: a real `vllm serve` with KVPP off, on, and on with broken transfers."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_process import run_process

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_QUESTIONS = 8


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo")
    command = [
        *(str(Path(sys.executable).with_name("vllm-kvpp")), "demo", "--json"),
        *("--questions", str(NUM_QUESTIONS), "--kv-memory-mib", "64", "--log-dir", str(folder / "logs")),
    ]
    result = run_process(command, dict(os.environ), folder / "output", 500)
    start = result.output.index("\n{") if not result.output.startswith("{") else 0
    assert result.returncode == 0, result.output[-3000:]
    assert result.leftovers == []
    said: dict[str, Any] = json.loads(result.output[start : result.output.rindex("}") + 1])
    assert any(path.stat().st_size for path in Path(folder / "logs").iterdir())
    return said


@pytest.mark.proves("`vllm serve`")
def test_answers_over_http_are_right_and_the_same_with_kvpp(document: dict[str, Any]) -> None:
    assert document["num_differing"] == 0
    assert document["on"]["num_right"] == document["off"]["num_right"] == NUM_QUESTIONS


def test_answers_over_http_are_wrong_while_transfers_are_broken_and_right_again_after(document: dict[str, Any]) -> None:
    assert document["broken"]["num_right"] < NUM_QUESTIONS
    assert document["mended"]["num_right"] == NUM_QUESTIONS


def test_the_server_has_the_tokens_that_the_plan_promised(document: dict[str, Any]) -> None:
    assert document["on"]["num_blocks"] == document["on"]["num_blocks_expected"]
    # Two of eight layers less to store, less the alignment of one buffer, which weighs in a small pool.
    assert document["factor"] == document["factor_expected"] > 1.25
