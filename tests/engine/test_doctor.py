"""`vllm-kvpp doctor` and `vllm-kvpp explain` against the real vLLM: command lines, and logs of engines that ran."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_process import NATIVE_ROPE, EngineRun

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COMMAND = str(Path(sys.executable).with_name("vllm-kvpp"))
SERVE = ("vllm", "serve", str(CHECKPOINT_DIR), "--enforce-eager", "--compilation-config", json.dumps(NATIVE_ROPE))
ON = ("--additional-config", json.dumps({"enable_kvpp": True, "kvpp": {"transfer": "full"}}))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def diagnose(*words: str, **environment: str) -> tuple[int, dict[str, Any]]:
    result = run("doctor", "--json", "--", *words, **environment)
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def test_a_valid_command_line_would_run_with_kvpp() -> None:
    code, document = diagnose(*SERVE, "--tensor-parallel-size", "2", *ON)
    verdict = document["command"]["verdict"]

    assert (code, verdict["outcome"], verdict["group_size"]) == (0, "on", 2), document
    assert verdict["options"]["transfer"] == "full"
    assert verdict["attention_backend"] in ("CPU_MLA", "AMX_MLA")
    for obstacle in ("decode_obstacle", "in_place_obstacle"):
        assert (verdict[obstacle] is None) == (verdict["attention_backend"] == "CPU_MLA")
    assert {check["level"] for check in document["checks"]} <= {"ok", "warning"}


def test_a_refused_command_line_lists_every_reason() -> None:
    speculation = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3})
    wrong = ("--decode-context-parallel-size", "2", "--speculative-config", speculation)
    code, document = diagnose(*SERVE, "--tensor-parallel-size", "2", *ON, *wrong)
    verdict = document["command"]["verdict"]

    assert (code, verdict["outcome"]) == (1, "refused"), document
    assert [reason.split(".")[0] for reason in verdict["reasons"]] == [
        "KVPP and DCP cannot be enabled at the same time",
        "KVPP supports speculative decoding with mtp or dspark only",
    ]


def test_a_plugin_that_is_not_loaded_is_noticed() -> None:
    code, document = diagnose("VLLM_PLUGINS=other", *SERVE, "--tensor-parallel-size", "2", *ON)

    assert (code, document["command"]["verdict"]["outcome"]) == (1, "not loaded"), document
    assert "VLLM_PLUGINS is 'other'" in next(check for check in document["checks"] if check["name"] == "plugin")["text"]


def test_a_malformed_command_line_is_one_line_on_stderr() -> None:
    result = run("doctor", "--", *SERVE, "--tensor-parallel-size", "two")

    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--tensor-parallel-size" in result.stderr


def explain(run_of: EngineRun, folder: Path) -> dict[str, Any]:
    log = folder / "engine.log"
    log.write_text(run_of.log)
    result = run("explain", "--json", str(log))
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_the_log_of_a_real_engine_is_explained(off_run: EngineRun, default_run: EngineRun, tmp_path: Path) -> None:
    document = explain(off_run, tmp_path)

    assert document["kvpp"]["is_on"] is False
    assert document["blocks"]["num_blocks"] == off_run.num_gpu_blocks
    assert document["with_kvpp"]["num_blocks"] == default_run.num_gpu_blocks


def test_the_log_of_an_engine_with_kvpp_says_what_was_gained(
    off_run: EngineRun, on_run: EngineRun, tmp_path: Path
) -> None:
    document = explain(on_run, tmp_path)
    (rank,) = document["kvpp"]["ranks"]

    assert document["blocks"]["num_blocks"] == on_run.num_gpu_blocks
    assert (rank["num_tokens"], rank["num_tokens_without"]) == (on_run.num_tokens, off_run.num_tokens)
