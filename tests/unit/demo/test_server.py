import os
import time

import psutil
import pytest

from vllm_kvpp.demo import server as server_module
from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.questions import make_batches
from vllm_kvpp.demo.server import run_server


@pytest.fixture(autouse=True)
def poll_often(monkeypatch):
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.05)


@pytest.fixture
def run(make_fake, interrupts):
    def run_fake(mode, *, timeout_seconds=30.0, phases=None, grace_seconds=0.3):
        return run_server(
            make_fake(mode),
            timeout_seconds=timeout_seconds,
            interrupts=interrupts,
            on_phase=(phases if phases is not None else []).append,
            grace_seconds=grace_seconds,
        )

    return run_fake


def test_a_server_is_ready_inside_the_context_and_gone_behind_it(run, read_pids, list_running):
    with run("plain") as server:
        assert server.client.is_ready()
        assert server.start_seconds > 0
        assert len(list_running(read_pids())) == 3
    assert list_running(read_pids()) == []
    assert not server.client.is_ready()


def test_a_server_is_gone_behind_an_error_of_the_caller_too(run, read_pids, list_running):
    with pytest.raises(ZeroDivisionError), run("stubborn"):
        raise ZeroDivisionError
    assert list_running(read_pids()) == []


def test_a_server_that_ends_at_the_start_is_reported_with_its_log_and_leaves_nothing(run, read_pids, list_running):
    with pytest.raises(DemoError) as caught, run("dies"):
        pass
    message = str(caught.value)
    assert "The server ended while it was" in message
    assert "exit code 7" in message
    assert "First error in its log: RuntimeError: no luck today" in message
    assert "server.log" in message
    assert "INFO non-default args" in message
    assert list_running(read_pids()) == []


def test_a_server_that_is_not_ready_in_time_is_reported_with_its_phase_and_ended(run, read_pids, list_running):
    started = time.monotonic()
    with pytest.raises(DemoError) as caught, run("never-ready,stubborn", timeout_seconds=1.5):
        pass
    assert "not ready within 1.5 s; it was reading the configuration" in str(caught.value)
    assert "--timeout" in str(caught.value)
    assert time.monotonic() - started < 15
    assert list_running(read_pids()) == []


def test_a_server_that_does_not_end_while_it_starts_gets_little_grace(run, read_pids, list_running, monkeypatch):
    monkeypatch.setattr(server_module, "START_GRACE_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(DemoError), run("never-ready,stubborn", timeout_seconds=1.5, grace_seconds=60):
        pass
    assert time.monotonic() - started < 30
    assert list_running(read_pids()) == []


def test_the_phase_of_the_start_is_told_while_waiting(run):
    phases = []
    with run("plain", phases=phases):
        pass
    assert phases[0] == "importing vLLM"


def test_a_server_that_breaks_when_asked_is_reported_with_its_log(run, read_pids, list_running):
    question = make_batches(2)[0][0]
    with pytest.raises(DemoError) as caught, run("breaks") as server:
        server.client.ask([question.prompt], num_tokens=3)
    assert "failed while it was in use" in str(caught.value)
    assert "First error in its log: ValueError: broken on purpose" in str(caught.value)
    assert list_running(read_pids()) == []


def test_a_server_that_does_not_answer_in_time_is_reported(run, read_pids):
    def ask_a_suspended_server():
        with run("plain") as server:
            server.client._timeout_seconds = 0.3
            psutil.Process(read_pids()[0]).suspend()
            server.client.read_cache_size()

    with pytest.raises(DemoError, match="ReadTimeout"):
        ask_a_suspended_server()


def test_shared_memory_of_the_servers_ranks_is_removed(tmp_path, monkeypatch, run, make_fake):
    monkeypatch.setattr(server_module, "SHARED_MEMORY_DIR", tmp_path)
    (tmp_path / "vllm_dist_abc-tp:0-cpushm_0").touch()
    (tmp_path / "vllm_dist_other-tp:0-cpushm_0").touch()
    with run("plain"), (tmp_path / "server.log").open("a") as log:
        log.write("world_size=2 distributed_init_method=file:///tmp/x/vllm_dist_abc backend=gloo\n")
    assert [name for name in os.listdir(tmp_path) if name.startswith("vllm")] == ["vllm_dist_other-tp:0-cpushm_0"]
