import pytest

from vllm_kvpp.doctor.diagnosis import diagnose
from vllm_kvpp.doctor.errors import DoctorError
from vllm_kvpp.doctor.serve_command import read_words

pytestmark = pytest.mark.usefixtures("installed")
TYPED = read_words(["A=b", "vllm", "serve", "MODEL"])


def test_vllm_is_asked_with_the_command_line_and_its_variables(make_findings):
    asked = []
    diagnose(TYPED, lambda *question: asked.append(question) or make_findings())

    assert asked == [(TYPED.command, {"A": "b"})]


def test_a_missing_vllm_is_not_asked(installed):
    installed(has_vllm=False)

    def ask(*question):
        raise AssertionError("asked")

    found = diagnose(TYPED, ask)
    assert (found.is_fine, found.verdict, found.has_command) == (False, None, True)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("on", True),
        ("off", True),
        ("no effect", True),
        ("not loaded", False),
        ("refused", False),
        ("refused by vLLM", False),
    ],
)
def test_only_a_server_that_would_not_do_as_told_is_not_fine(outcome, expected, make_findings, make_verdict):
    findings = make_findings(verdict=make_verdict(outcome))

    assert diagnose(TYPED, lambda *_: findings).is_fine is expected


def test_a_problem_of_the_installation_is_not_fine(make_findings):
    assert not diagnose(None, lambda *_: make_findings(faults=("x",))).is_fine


def test_a_warning_alone_is_fine(make_findings):
    assert diagnose(None, lambda *_: make_findings(attention_backend=None)).is_fine


def test_a_malformed_command_line_is_bad_input(make_findings, make_verdict):
    findings = make_findings(verdict=make_verdict("malformed", reasons=("argument --x: bad",)))

    with pytest.raises(DoctorError, match="argument --x: bad"):
        diagnose(TYPED, lambda *_: findings)
