"""The whole command over fake servers: exit codes, what is printed where, and that no process and no file stays."""

import json
import os
import signal
import time

import pytest

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def list_left(tmp_path, read_pids, list_running):
    """Lists processes and temporary files that a demo has left behind."""

    def left():
        pids = [pid for name in ("pids-on", "pids-off") if (tmp_path / name).exists() for pid in read_pids(name)]
        assert pids
        return list_running(pids), os.listdir(tmp_path / "tmp")

    return left


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_as_claimed_prints_the_table_and_leaves_nothing(start_demo, list_left):
    process = start_demo("--questions", "4")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "right answers" in out
    assert "gives the same answers" in " ".join(out.split())
    assert "Starting vLLM with KVPP" in err
    assert list_left() == ([], [])


def test_json_goes_to_stdout_alone(start_demo):
    process = start_demo("--questions", "4", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    document = json.loads(out)
    assert document["is_as_claimed"] is True
    assert document["on"]["num_tokens"] > document["off"]["num_tokens"]


def test_a_claim_that_does_not_hold_is_exit_code_1_and_keeps_the_logs(start_demo, list_left):
    process = start_demo("--questions", "4", on="kvpp,immune")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "Something is off" in out
    assert "do not show whether the cache was moved" in " ".join(out.split())
    running, files = list_left()
    assert running == []
    (log_dir,) = files
    assert f"/{log_dir}." in err


def test_a_chosen_log_folder_is_kept(start_demo, list_left, tmp_path):
    process = start_demo("--questions", "2", "--log-dir", str(tmp_path / "logs" / "mine"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert sorted(os.listdir(tmp_path / "logs" / "mine")) == ["with-kvpp.log", "without-kvpp.log"]
    assert str(tmp_path / "logs" / "mine") in err
    assert list_left() == ([], [])


@pytest.mark.parametrize(("on", "timeout"), [("dies", "30"), ("never-ready", "4"), ("kvpp,breaks", "30")])
def test_a_server_that_fails_is_exit_code_2_without_traceback(start_demo, list_left, on, timeout):
    process = start_demo("--timeout", timeout, on=on)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert out == ""
    assert "The demo cannot go on." in err
    assert "with-kvpp.log" in err
    assert "Traceback" not in err
    running, files = list_left()
    assert running == []
    assert len(files) == 1


def test_a_failure_with_json_is_a_document_too(start_demo):
    process = start_demo("--json", on="dies")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "exit code 7" in json.loads(out)["error"]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_a_server_starts_ends_everything(start_demo, list_left, tmp_path, number, exit_code):
    process = start_demo(on="never-ready")
    wait_for((tmp_path / "pids-on").exists)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_code, err
    assert "the servers have been ended" in err
    assert "Traceback" not in err
    assert list_left()[0] == []
