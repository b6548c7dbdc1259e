import json
import os
import subprocess
import sys

import pytest

OPTIONS = (
    "--tp --pcp --pp --pp-partition --dtype --kv-cache-dtype --block-size --kv-memory --gpu --gpu-memory-utilization "
    "--draft --context --requests --max-num-batched-tokens --link --transfer --transport --plot --json"
).split()


@pytest.mark.parametrize("option", OPTIONS)
def test_the_help_names_every_option(option, run):
    assert option in run("--help").output


def test_tables_are_printed_with_exit_code_0(run):
    result = run("deepseek-v3", "--kv-memory", "40GiB")

    assert result.exit_code == 0
    assert "What each rank keeps" in result.stdout
    assert result.stderr == ""


def test_one_document_is_printed_for_programs(run):
    result = run("deepseek-v3", "--kv-memory", "40GiB", "--tp", 4, "--json")
    document = json.loads(result.stdout)

    assert (result.exit_code, document["group_size"], document["options"]["tp_size"]) == (0, 4, 4)


def test_every_option_reaches_the_plan(run):
    asked = {
        "tp": ("tp_size", 4),
        "pcp": ("pcp_size", 2),
        "pp": ("pp_size", 2),
        "pp-partition": ("pp_partition", "31,30"),
        "dtype": ("dtype", "float16"),
        "kv-cache-dtype": ("kv_cache_dtype", "fp8"),
        "block-size": ("block_size", 32),
        "kv-memory": ("kv_memory", "20GiB"),
        "gpu": ("gpu", "h100"),
        "gpu-memory-utilization": ("gpu_memory_utilization", 0.5),
        "draft": ("draft", "mtp"),
        "context": ("context", 1000),
        "requests": ("num_requests", 7),
        "max-num-batched-tokens": ("num_batched_tokens", 4096),
        "link": ("link", "pcie4"),
        "transfer": ("transfer", "full"),
        "decode": ("decode", "owner"),
        "transport": ("transport", "shared-memory"),
    }
    arguments = [part for name, (_, value) in asked.items() for part in (f"--{name}", value)]
    options = json.loads(run("deepseek-v3", *arguments, "--json").stdout)["options"]

    assert options == {"model": "deepseek-v3", **dict(asked.values())}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nobody/no-model", "--kv-memory", "1"], "nobody/no-model"),
        (["deepseek-v4-flash", "--kv-memory", "1"], "is hybrid"),
        (["minicpm3-4b", "--kv-memory", "1"], "minicpm3"),
        (["deepseek-v3"], "--kv-memory"),
        (["deepseek-v3", "--gpu", "abacus"], "--gpu is 'abacus'"),
        (["deepseek-v3", "--kv-memory", "1", "--kv-cache-dtype", "int3"], "--kv-cache-dtype is 'int3'"),
        (["deepseek-v3", "--kv-memory", "1", "--tp", "3"], "--tp is 3, which does not divide"),
        (["deepseek-v3", "--kv-memory", "1", "--tp", "64"], "smallest stage has 61 layers"),
        (["deepseek-v3", "--kv-memory", "1", "--tp", "1"], "use --tp 2 or more"),
        (["deepseek-v3", "--kv-memory", "1MiB"], "holds no block"),
        (["deepseek-v3", "--kv-memory", "much"], "--kv-memory is 'much'"),
        (["deepseek-v3", "--kv-memory", "1", "--link", "string"], "--link is 'string'"),
        (["deepseek-v3", "--kv-memory", "9", "--decode", "in_place"], "--decode is in_place, but --transport is"),
        (["deepseek-v2", "--kv-memory", "9", "--draft", "mtp"], "--draft is mtp"),
        (["deepseek-v3", "--kv-memory", "9", "--pp", "2", "--pp-partition", "1,2"], "--pp-partition is 1,2"),
        (["deepseek-v3", "--gpu", "h200", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization is 2"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(arguments, expected, run):
    result = run(*arguments)

    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stderr.startswith("vllm-kvpp plan: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("changes", [{"kv_lora_rank": None}, {"num_hidden_layers": "many\nlines"}])
def test_a_configuration_without_a_needed_field_ends_with_one_line(changes, run, config_path):
    result = run(config_path(**changes), "--kv-memory", "1GiB", "--tp", 2)

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert next(iter(changes)) in result.stderr


def test_a_name_of_several_lines_still_ends_with_one(run, tmp_path):
    (tmp_path / "two\nlines").write_text("no JSON")
    result = run(tmp_path / "two\nlines", "--kv-memory", "1GiB")

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("content", ["{", "[]", "null", "\x00"])
def test_a_corrupt_file_ends_with_one_line(content, run, tmp_path):
    (tmp_path / "config.json").write_text(content)
    result = run(tmp_path, "--kv-memory", "1GiB")

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("option", ["--tp", "--pcp", "--pp", "--block-size", "--context", "--requests"])
def test_a_number_that_is_none_is_refused_by_name(option, run):
    result = run("deepseek-v3", "--kv-memory", "1GiB", option, "0")

    assert result.exit_code == 2
    assert option in result.output


def test_the_command_loads_neither_torch_nor_vllm():
    code = (
        "import sys; from typer.testing import CliRunner; from vllm_kvpp.cli import app; "
        "result = CliRunner().invoke(app, ['plan', 'glm-5.2-fp8', '--gpu', 'h200']); "
        "print(result.exit_code, [name for name in sys.argv[1:] if name in sys.modules])"
    )
    unwanted = ["torch", "vllm", "numpy", "httpx", "matplotlib", "huggingface_hub"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *unwanted]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)

    assert result.stdout.strip() == "0 []"
