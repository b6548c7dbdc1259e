import socket

import psutil
import pytest
from typer.testing import CliRunner

import vllm_kvpp.demo.app as demo_app
from vllm_kvpp import __version__
from vllm_kvpp.cli import app
from vllm_kvpp.demo.capacity import ModelShape


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.fixture
def with_vllm_and_model(monkeypatch):
    monkeypatch.setattr(demo_app, "check_vllm", lambda: None)
    monkeypatch.setattr(demo_app, "check_checkpoint", lambda _folder: None)
    shape = ModelShape(num_layers=8, num_heads=4, latent_dim=576)
    monkeypatch.setattr(demo_app, "read_shape", lambda _path: shape)


def test_without_a_command_the_help_is_shown(run):
    result = run()
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "plan" in result.output


def test_the_version_is_the_packages(run):
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"vllm-kvpp {__version__}\n")


@pytest.mark.parametrize(
    "option", ["--tp", "--questions", "--port", "--kv-memory-mib", "--timeout", "--json", "--log-dir"]
)
def test_the_demos_help_names_every_option(run, option):
    assert option in run("demo", "--help").output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tp", "1"], "--tp"),
        (["--questions", "1"], "--questions"),
        (["--port", "70000"], "--port"),
        (["--kv-memory-mib", "1"], "--kv-memory-mib"),
        (["--timeout", "0"], "--timeout"),
        (["--unknown"], "--unknown"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(run, arguments, expected):
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert expected in result.output


def check_refusal(result, expected):
    assert result.exit_code == 2
    assert "The demo cannot go on." in result.output
    assert expected in result.output
    assert "Traceback" not in result.output


def test_a_busy_port_is_refused_before_anything_starts(run, with_vllm_and_model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = run("demo", "--port", str(port))
    check_refusal(result, f"Port {port} cannot be used")
    assert "logs are in" not in result.output


def test_too_few_cpus_are_refused(run, with_vllm_and_model, monkeypatch):
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: [0])
    check_refusal(run("demo"), "--tp 2 needs 2 CPUs")


def test_too_little_memory_is_refused(run, with_vllm_and_model):
    check_refusal(run("demo", "--kv-memory-mib", "100000000"), "GB of memory")


def test_without_vllm_it_says_what_is_needed(run, monkeypatch):
    monkeypatch.setattr("vllm_kvpp.demo.machine._find_version", lambda _distribution: None)
    check_refusal(run("demo"), "The demo needs a CPU build of vLLM.")


def test_a_log_folder_that_cannot_be_made_is_refused(run, with_vllm_and_model, tmp_path):
    (tmp_path / "file").touch()
    check_refusal(run("demo", "--log-dir", str(tmp_path / "file" / "logs")), "--log-dir")
