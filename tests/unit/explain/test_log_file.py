import io
import sys
from types import SimpleNamespace

import pytest

from vllm_kvpp.explain import log_file
from vllm_kvpp.explain.errors import ExplainError
from vllm_kvpp.explain.log_file import parse_line, read_excerpt

LINE = "(EngineCore pid=7) INFO [kv_cache_utils.py:2327] GPU KV cache size: 64 tokens"


@pytest.fixture
def write_file(tmp_path):
    def write_file(content):
        (tmp_path / "log").write_bytes(content)
        return str(tmp_path / "log")

    return write_file


def test_a_line_names_its_process_and_loses_its_colours():
    line = parse_line("\x1b[0;36m(Worker_TP0 pid=5)\x1b[0;0m \x1b[32mINFO\x1b[0m \x1b[90m12:00\x1b[0m hello\r\n")

    assert (line.process, line.text) == ("Worker_TP0 pid=5", "(Worker_TP0 pid=5) INFO 12:00 hello")


@pytest.mark.parametrize("name", ["EngineCore_DP1 pid=3", "VllmWorker TP0 pid=3", "RayWorkerWrapper pid=3"])
def test_processes_of_every_kind_are_named(name):
    assert parse_line(f"({name}, ip=1.2.3.4) INFO x").process == name


def test_a_line_without_a_process_has_none():
    assert parse_line("INFO x (y)").process == ""


def test_only_lines_that_matter_are_kept(write_file):
    path = write_file(f"hello\n{LINE}\nGPU KV cache usage: 3%\n".encode())

    assert [line.text for line in read_excerpt(path).lines] == [LINE]


def test_what_is_not_utf8_is_replaced(write_file):
    assert "�" in read_excerpt(write_file(b"\xff" + LINE.encode())).lines[0].text


def test_the_standard_input_is_read_for_a_dash(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(LINE.encode())))

    assert len(read_excerpt("-").lines) == 1


def test_a_large_log_is_read_up_to_the_limit_and_said_to_be_cut(write_file, monkeypatch):
    monkeypatch.setattr(log_file, "LARGEST_LOG_BYTES", 500)
    excerpt = read_excerpt(write_file((LINE + "\n").encode() * 100))

    assert excerpt.is_cut
    assert 1 < len(excerpt.lines) < 10


def test_a_log_just_at_the_limit_is_not_cut(write_file, monkeypatch):
    content = (LINE + "\n").encode() * 10
    monkeypatch.setattr(log_file, "LARGEST_LOG_BYTES", len(content))

    assert not read_excerpt(write_file(content)).is_cut


def test_an_endless_line_is_read_in_pieces(write_file, monkeypatch):
    monkeypatch.setattr(log_file, "LONGEST_LINE_BYTES", 100)
    lines = read_excerpt(write_file(b"KVPP" + b"x" * 1000)).lines

    assert [len(line.text) for line in lines] == [100]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "is empty"), (b"\x7fELF\x00\x01", "is binary"), (b"fine\n" * 9 + b"\x00", "is binary")],
)
def test_what_is_no_log_is_refused(content, expected, write_file):
    with pytest.raises(ExplainError, match=expected):
        read_excerpt(write_file(content))


def test_what_cannot_be_opened_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ExplainError, match="No such file"):
        read_excerpt(str(tmp_path / "none"))
    with pytest.raises(ExplainError, match="Is a directory"):
        read_excerpt(str(tmp_path))
    with pytest.raises(ExplainError, match="no path"):
        read_excerpt("a\0b")
