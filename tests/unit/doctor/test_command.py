import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_kvpp.cli import app
from vllm_kvpp.doctor import command

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture
def run(monkeypatch, make_findings):
    """Run the command with a vLLM that answers with `verdict`; the last question is in `asked`."""

    def run(*words, verdict=None, findings=None):
        def ask(question, environment, *, timeout_seconds):
            asked.append((question, dict(environment), timeout_seconds))
            return findings or make_findings(verdict=verdict)

        monkeypatch.setattr(command, "ask_vllm", ask)
        return CliRunner().invoke(app, ["doctor", *words])

    asked = run.asked = []
    return run


def test_a_good_environment_ends_with_exit_code_0(run):
    result = run()

    assert (result.exit_code, result.stderr) == (0, "")
    assert "Nothing stands in KVPP's way." in result.stdout
    assert run.asked == [(None, {}, 180)]


def test_a_problem_ends_with_exit_code_1(run, installed):
    installed(plugin_target=None)
    result = run()

    assert result.exit_code == 1
    assert "is not registered" in result.stdout


@pytest.mark.parametrize("separator", [("--",), ()])
def test_the_command_line_needs_no_separator(separator, run, make_verdict):
    result = run(*separator, "vllm", "serve", "MODEL", "--json", "--timeout", "x", verdict=make_verdict())

    assert result.exit_code == 0
    assert run.asked[0][0].arguments == ("MODEL", "--json", "--timeout", "x")
    assert "With this command line: KVPP would run" in result.stdout


def test_a_running_kvpp_shows_group_and_options(run, make_verdict):
    output = run("--", "vllm", "serve", "MODEL", verdict=make_verdict(messages=("KVPP is on: group size 8.",))).stdout

    for expected in ("group size", "kvpp.transfer", "chosen by KVPP", "KVPP is on: group size 8.", "FLASHMLA"):
        assert expected in output


MOVED = "history is moved to every rank, since tokens cannot attend at the owner (why not)"
AT_OWNER_OR_MOVED = "tokens attend at each layer's owner, or history is moved where that is cheaper"


@pytest.mark.parametrize(
    ("decode", "obstacles", "expected"),
    [
        (
            "auto",
            (None, None),
            "every rank reads the owners' memory in place; where a start finds that they cannot share it, "
            f"{AT_OWNER_OR_MOVED}",
        ),
        ("auto", (None, "not here"), f"{AT_OWNER_OR_MOVED}; it cannot be read in place (not here)"),
        ("auto", ("why not", "not here"), f"decode {MOVED}"),
        ("auto", ("why not", None), f"where a start finds that they cannot share it, {MOVED}"),
        ("in_place", ("why not", None), "memory in place; a start is refused where they cannot share it"),
        ("owner", (None, "not here"), "tokens attend at each layer's owner"),
        ("transfer", ("why not", None), "history is moved to every rank, as kvpp.decode says"),
    ],
)
def test_a_running_kvpp_says_where_decode_tokens_attend(decode, obstacles, expected, run, make_verdict):
    verdict = make_verdict(options={"decode": decode}, decode_obstacle=obstacles[0], in_place_obstacle=obstacles[1])
    output = " ".join(run("--", "vllm", "serve", "MODEL", verdict=verdict).stdout.split())

    assert f"{expected} Nothing stands" in output


def test_the_document_has_both_obstacles_of_decode(run, make_verdict):
    verdict = make_verdict(decode_obstacle="why not", in_place_obstacle="not here")
    document = json.loads(run("--json", "--", "vllm", "serve", "MODEL", verdict=verdict).stdout)["command"]["verdict"]

    assert (document["decode_obstacle"], document["in_place_obstacle"]) == ("why not", "not here")


def test_a_refusal_lists_every_reason_and_ends_with_exit_code_1(run, make_verdict):
    verdict = make_verdict("refused", reasons=("one (a; b)", "two (c; d)"), group_size=None)
    result = run("--", "vllm", "serve", "MODEL", verdict=verdict)

    assert result.exit_code == 1
    assert "KVPP refuses this command line" in result.stdout
    assert "• one (a; b)" in result.stdout
    assert "• two (c; d)" in result.stdout


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("off", "KVPP is off"),
        ("no effect", "the group has 1 rank"),
        ("not loaded", "the plugin is not loaded"),
        ("refused by vLLM", "vLLM refuses this command line"),
    ],
)
def test_every_other_outcome_is_said(outcome, expected, run, make_verdict):
    assert expected in run("--", "vllm", "serve", "MODEL", verdict=make_verdict(outcome)).stdout


def test_one_document_is_printed_for_programs(run, make_verdict):
    verdict = make_verdict("refused", reasons=("one",))
    result = run("--json", "--", "vllm", "serve", "MODEL", verdict=verdict)
    document = json.loads(result.stdout)

    assert document.keys() == {"version", "is_fine", "installation", "checks", "command"}
    assert document["is_fine"] is False
    assert document["command"]["verdict"]["outcome"] == "refused"
    assert document["command"]["verdict"]["reasons"] == ["one"]
    assert {check["level"] for check in document["checks"]} == {"ok"}


def test_without_a_command_line_the_document_has_none(run):
    assert json.loads(run("--json").stdout)["command"] is None


def test_no_argument_of_the_command_line_is_repeated(run, make_verdict):
    output = run("--json", "--", "KEY=secret", "vllm", "serve", "MODEL", "--api-key", "secret", verdict=make_verdict())

    assert "secret" not in output.stdout


def test_the_time_limit_reaches_vllm(run):
    run("--timeout", "7")

    assert run.asked[0][2] == 7


@pytest.mark.parametrize("words", [("vllm", "bench"), ("vllm serve 'MODEL",), ("python", "x.py\ny")])
def test_what_starts_no_server_ends_with_one_line_and_exit_code_2(words, run):
    result = run("--", *words)

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("vllm-kvpp doctor: ")
    assert run.asked == []


def test_what_vllm_cannot_read_ends_with_one_line_and_exit_code_2(run, make_verdict):
    verdict = make_verdict("malformed", reasons=("argument --tensor-parallel-size: invalid int value: 'x'",))
    result = run("--", "vllm", "serve", "MODEL", verdict=verdict)

    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "argument --tensor-parallel-size: invalid int value: 'x'" in result.stderr


def test_a_missing_vllm_is_said_with_exit_code_1(run, installed):
    installed(has_vllm=False, vllm_versions={}, torch_version=None)
    result = run("--", "vllm", "serve", "MODEL")

    assert result.exit_code == 1
    assert "vLLM is not installed" in result.stdout
    assert "was not checked, since vLLM cannot be asked" in result.stdout
    assert run.asked == []


def test_the_help_says_the_exit_codes():
    output = " ".join(CliRunner().invoke(app, ["doctor", "--help"]).output.split())

    assert "Exit code 0: nothing stands" in output
    assert "2: the command line cannot be read" in output


def test_the_command_loads_neither_torch_nor_vllm():
    code = (
        "import sys; from vllm_kvpp.doctor import command; "
        "print([name for name in ('torch', 'vllm', 'numpy', 'httpx') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)

    assert result.stdout.strip() == "[]"
