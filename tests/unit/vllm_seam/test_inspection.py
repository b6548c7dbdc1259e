import io
import json
import sys

import pytest
from vllm import platforms, plugins

from vllm_kvpp.vllm_seam import command_line, inspection
from vllm_kvpp.vllm_seam.findings import Findings, ServeCommand, Verdict
from vllm_kvpp.vllm_seam.inspection import inspect_vllm, main
from vllm_kvpp.vllm_seam.platform_hook import wrap_platform_hook
from vllm_kvpp.vllm_seam.symbols import SEAM


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    """A platform to which nobody has attached, and plugins that do nothing."""

    class SomePlatform:
        device_type = "abacus"

        @classmethod
        def check_and_update_config(cls, vllm_config):
            """Nothing to check."""

    monkeypatch.setattr(platforms, "current_platform", SomePlatform())
    monkeypatch.setattr(plugins, "load_general_plugins", lambda: None)
    monkeypatch.setattr(inspection, "find_faults", lambda symbols=SEAM: ())
    monkeypatch.setattr(inspection, "_name_usual_backend", lambda: "SOME_MLA")
    return SomePlatform


def test_platform_and_backend_are_named():
    found = inspect_vllm(None)

    assert (found.platform, found.device, found.attention_backend) == ("SomePlatform", "abacus", "SOME_MLA")
    assert (found.num_symbols, found.error, found.verdict) == (len(SEAM), None, None)


def test_a_plugin_that_attaches_when_plugins_are_loaded_is_attached(platform, monkeypatch):
    assert not inspect_vllm(None).is_attached
    monkeypatch.setattr(plugins, "load_general_plugins", lambda: wrap_platform_hook(platform))
    assert inspect_vllm(None).is_attached


def test_a_plugin_that_raises_is_an_answer(monkeypatch):
    def load():
        raise RuntimeError("no hook")

    monkeypatch.setattr(plugins, "load_general_plugins", load)
    assert inspect_vllm(None).attach_error == "RuntimeError: no hook"


def test_faults_are_an_answer(monkeypatch):
    monkeypatch.setattr(inspection, "find_faults", lambda symbols=SEAM: ("fault",) if symbols is SEAM else ())

    assert inspect_vllm(None).faults == ("fault",)


def test_a_command_line_is_judged(monkeypatch):
    verdict = Verdict(outcome="off")
    monkeypatch.setattr(command_line, "judge_command", lambda command, is_attached: verdict)

    assert inspect_vllm(ServeCommand(arguments=("M",))).verdict == verdict


def test_without_what_the_doctor_needs_no_command_line_is_judged(monkeypatch):
    monkeypatch.setattr(inspection, "find_faults", lambda symbols=SEAM: () if symbols is SEAM else ("gone",))
    found = inspect_vllm(ServeCommand(arguments=("M",)))

    assert (found.doctor_faults, found.verdict) == (("gone",), None)


def test_a_vllm_that_cannot_be_imported_is_an_answer(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)

    assert "import of vllm.platforms halted" in inspect_vllm(None).error


@pytest.mark.parametrize("question", ["", json.dumps({"arguments": ["M"]})])
def test_the_answer_is_written_to_the_file(question, tmp_path, monkeypatch):
    answer = lambda command: Findings(device=str(command and command.arguments[0]))  # noqa: E731
    monkeypatch.setattr(inspection, "inspect_vllm", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO(question))
    monkeypatch.setattr(sys, "argv", ["inspection", str(tmp_path / "answer")])
    main()

    answer = Findings.model_validate_json((tmp_path / "answer").read_text())
    assert answer.device == ("M" if question else "None")
