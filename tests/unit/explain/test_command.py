import json
import os
import subprocess
import sys

import pytest


def test_a_log_is_explained_with_exit_code_0(run, log_path, write):
    result = run(log_path(write.gpu_log()))

    assert result.exit_code == 0
    assert "What the log says" in result.stdout
    assert "the whole engine: EngineCore" in result.stdout
    assert "one rank: Worker_TP0" in result.stdout
    assert result.stderr == ""


def test_a_log_from_the_standard_input_is_explained(run, write):
    assert "What the log says" in run("-", input="\n".join(write.gpu_log())).stdout


def test_one_document_is_printed_for_programs(run, log_path, write):
    document = json.loads(run(log_path(write.gpu_log()), "--json").stdout)

    assert document.keys() == {
        *("version", "source", "num_starts", "settings", "memories", "engines", "blocks", "kvpp", "with_kvpp"),
        *("explanations", "notes"),
    }
    assert document["blocks"]["num_blocks"] == document["with_kvpp"]["num_blocks_without_kvpp"] == 11_173
    assert document["engines"][0]["num_tokens"] == 715_072


def test_the_options_fill_in_what_the_log_lacks(run, log_path, write):
    arguments = (*("--model", "deepseek-v3"), *("--tp", 4), *("--block-size", 32), "--json")
    path = log_path([write.gpu_memory(gib=46.8), write.pool()])
    found = json.loads(run(path, *arguments).stdout)["with_kvpp"]

    assert (found["model"], found["group_size"], found["block_size"]) == ("deepseek-ai/DeepSeek-V3", 4, 32)


def test_of_several_starts_the_last_is_explained_and_said_so(run, log_path, write):
    lines = [*write.gpu_log(), write.arguments(tp=4), write.engine(tp=4), write.gpu_memory(gib=46.8), write.pool()]
    document = json.loads(run(log_path(lines), "--json").stdout)

    assert (document["num_starts"], document["settings"]["tp_size"]) == (2, 4)
    assert "The log has 2 starts; this is the last one." in document["notes"]


def test_many_ranks_do_not_flood_the_table(run, log_path, write):
    lines = [write.cpu_memory(rank=rank, pid=rank, gib=1) for rank in range(64)]
    output = run(log_path([*lines, write.pool()])).stdout

    assert output.count("Worker_TP") == 16
    assert "50 more" in output


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"\x00\x01", "is binary"),
        (b"hello\n", "none of vLLM's start-up lines; looked for 'KV cache size"),
        (b"INFO GPU KV cache usage: 3%\n", "none of vLLM's start-up lines"),
    ],
)
def test_what_is_no_log_ends_with_one_line_and_exit_code_2(content, expected, run, tmp_path):
    (tmp_path / "log").write_bytes(content)
    result = run(tmp_path / "log")

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("vllm-kvpp explain: ")
    assert expected in result.stderr


@pytest.mark.parametrize("path", ["/nowhere/log", "/", "/dev/zero", "two\nlines"])
def test_what_cannot_be_read_ends_with_one_line_and_exit_code_2(path, run):
    result = run(path)

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_a_file_that_may_not_be_read_ends_with_one_line(run, log_path, write):
    path = log_path(write.gpu_log())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("needs a user who is not root")
    result = run(path)

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "Permission denied" in result.stderr


def test_a_model_that_is_none_ends_with_one_line(run, log_path, write):
    result = run(log_path(write.gpu_log()), "--model", "no-model")

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--model is 'no-model'" in result.stderr


def test_a_long_log_takes_little_time_and_nothing_heavy_is_loaded(log_path, write):
    path = log_path([*write.gpu_log(), *["INFO Avg prompt throughput: 1 tokens/s, GPU KV cache usage: 1%"] * 100_000])
    code = (
        "import sys; from typer.testing import CliRunner; from vllm_kvpp.cli import app; "
        "result = CliRunner().invoke(app, ['explain', sys.argv[1]]); "
        "print(result.exit_code, [name for name in ('torch', 'vllm', 'numpy', 'httpx') if name in sys.modules]); "
        "import time; print(time.process_time())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=environment, check=True
    )

    loaded, seconds = result.stdout.splitlines()
    assert loaded == "0 []"
    # Of the processor, not of the clock: tests share their machine, and a busy one still slows them.
    assert float(seconds) < 3
