import pytest

from vllm_kvpp.doctor import vllm_process
from vllm_kvpp.doctor.vllm_process import ask_vllm
from vllm_kvpp.vllm_seam.findings import ServeCommand

ANSWER = """
import pathlib, sys
print("vLLM says this on stdout")
print("and this on stderr", file=sys.stderr)
question = sys.stdin.read()
pathlib.Path(sys.argv[1]).write_text('{"device": "%s"}' % ("asked" if "MODEL" in question else "nothing asked"))
"""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Ask a module with this code in place of vLLM's inspection."""

    def ask(code, *, command=None, timeout_seconds=30, **environment):
        (tmp_path / "fake_inspection.py").write_text(code)
        monkeypatch.setattr(vllm_process, "INSPECTION", "fake_inspection")
        environment = {"PYTHONPATH": str(tmp_path), **environment}
        return ask_vllm(command, environment, timeout_seconds=timeout_seconds)

    return ask


def test_the_answer_comes_back_and_nothing_else(ask, capfd):
    assert ask(ANSWER).device == "nothing asked"
    assert capfd.readouterr() == ("", "")


def test_the_command_line_reaches_the_process(ask):
    assert ask(ANSWER, command=ServeCommand(arguments=("MODEL",))).device == "asked"


def test_the_command_line_is_not_seen_in_the_list_of_processes(ask):
    code = ANSWER.replace("question = sys.stdin.read()", "question = ' '.join(sys.argv)")

    assert ask(code, command=ServeCommand(arguments=("MODEL",))).device == "nothing asked"


def test_variables_reach_the_process(ask):
    code = ANSWER.replace("question = sys.stdin.read()", "import os; question = os.environ['SOME_VARIABLE']")

    assert ask(code, SOME_VARIABLE="MODEL").device == "asked"


def test_a_folder_named_vllm_is_not_imported_from_the_working_directory(ask, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code = ANSWER.replace("question = sys.stdin.read()", "import os; question = 'MODEL' * (os.getcwd() in sys.path)")

    assert ask(code).device == "nothing asked"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ImportError('no libcuda.so.1')", "code 1 (its last line: ImportError: no libcuda.so.1)"),
        ("import os; os._exit(3)", "ended with code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with code -9"),
        ("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{')", "ended with code 0"),
    ],
)
def test_a_process_that_does_not_answer_is_an_error(code, expected, ask):
    assert expected in ask(code).error


def test_a_process_that_takes_too_long_is_an_error(ask):
    found = ask("import time; print('importing', flush=True); time.sleep(60)", timeout_seconds=1)

    assert found.error == "no answer within 1 s; raise --timeout (its last line: importing)"
