import signal
import time

import pytest

from vllm_kvpp.demo.processes import ProcessTree


@pytest.fixture
def start(make_fake, tmp_path):
    trees = []

    def start_tree(mode):
        command = make_fake(mode)
        tree = ProcessTree(command.argv, env=command.env, log_path=command.log_path)
        trees.append(tree)
        deadline = time.monotonic() + 20
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            assert time.monotonic() < deadline, command.log_path.read_text()
            time.sleep(0.02)
        return tree

    yield start_tree
    for tree in trees:
        tree.stop(grace_seconds=0)


def test_stop_ends_children_too_also_one_in_a_session_of_its_own(start, read_pids, list_running):
    tree = start("plain")
    pids = read_pids()
    assert len(list_running(pids)) == 3
    tree.stop(grace_seconds=0.2)
    assert list_running(pids) == []


def test_stop_kills_what_ignores_sigterm_after_the_grace_time(start, read_pids, list_running):
    tree = start("stubborn")
    started = time.monotonic()
    tree.stop(grace_seconds=0.5)
    assert time.monotonic() - started >= 0.5
    assert tree.exit_code == -signal.SIGKILL
    assert list_running(read_pids()) == []


def test_the_root_has_the_grace_time_to_end_itself_and_its_children(start):
    tree = start("tidy")
    tree.stop(grace_seconds=20)
    assert tree.exit_code == 0


def test_children_of_a_root_that_has_died_are_found_and_ended(start, read_pids, list_running):
    tree = start("dies")
    deadline = time.monotonic() + 10
    while tree.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert tree.exit_code == 7
    _, child = read_pids()
    assert list_running([child]) == [child]
    tree.stop(grace_seconds=5)
    assert list_running([child]) == []


def test_what_a_root_leaves_behind_does_not_take_the_whole_grace_time(start, read_pids, list_running):
    tree = start("plain")
    started = time.monotonic()
    tree.stop(grace_seconds=30)
    assert time.monotonic() - started < 10
    assert list_running(read_pids()) == []


def test_stopping_twice_does_nothing_the_second_time(start):
    tree = start("plain")
    tree.stop(grace_seconds=5)
    started = time.monotonic()
    tree.stop(grace_seconds=5)
    assert time.monotonic() - started < 1
