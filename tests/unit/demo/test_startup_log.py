import pytest

from vllm_kvpp.demo.startup_log import (
    FIRST_PHASE,
    PHASES,
    find_first_error,
    find_phase,
    find_shared_memory,
    read_log,
    take_last_lines,
)


def test_an_empty_log_is_in_the_first_phase():
    assert find_phase("") == FIRST_PHASE


@pytest.mark.parametrize(("index", "expected"), [(index, phase) for index, (_, phase) in enumerate(PHASES)])
def test_the_last_mark_in_the_log_names_the_phase(index, expected):
    log = "\n".join(f"(Worker pid=1) INFO [x.py:1] {mark} 1" for mark, _ in PHASES[: index + 1])
    assert find_phase(log) == expected


def test_the_first_error_is_found_without_the_prefix_of_its_line():
    log = "(Worker_TP0 pid=5) ERROR [x.py:1] KVPPBudgetError: too small\n(EngineCore) RuntimeError: Engine core failed"
    assert find_first_error(log) == "KVPPBudgetError: too small"


def test_a_warning_that_speaks_of_an_error_is_none():
    assert (
        find_first_error("(APIServer) WARNING [x.py:1] This can cause errors like `OSError: [Errno 24] Too many")
        is None
    )


def test_a_log_without_error_has_none():
    assert find_first_error("INFO all is well\nTraceback (most recent call last):") is None


def test_the_last_lines_leave_empty_ones_out():
    assert take_last_lines("a\n\nb\n\n\nc\n", 2) == "b\nc"


def test_shared_memory_is_found_by_the_name_of_the_init_file():
    line = "world_size=2 rank={} distributed_init_method=file:///tmp/a-b/vllm_dist_12ab backend=gloo\n"
    assert find_shared_memory(line.format(0) + line.format(1)) == {"vllm_dist_12ab"}


def test_a_log_that_is_not_there_yet_is_empty(tmp_path):
    assert read_log(tmp_path / "none.log") == ""


def test_bytes_that_are_no_text_do_not_stop_the_reading(tmp_path):
    (tmp_path / "log").write_bytes(b"a\xff\n")
    assert read_log(tmp_path / "log").startswith("a")
