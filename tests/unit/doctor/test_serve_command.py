import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.doctor.errors import DoctorError
from vllm_kvpp.doctor.serve_command import read_words

ARGUMENTS = ("MODEL", "--tensor-parallel-size", "2", "--additional-config", '{"enable_kvpp": true}')


@pytest.mark.parametrize(
    "start",
    [
        (),
        ("serve",),
        ("vllm", "serve"),
        ("/venv/bin/vllm", "serve"),
        ("python", "-m", "vllm.entrypoints.openai.api_server"),
        ("/usr/bin/python3.11", "-u", "-m", "vllm.entrypoints.launchers.api_server.entry"),
        ("python3", "-m", "vllm.entrypoints.cli.main", "serve"),
        ("env", "vllm", "serve"),
    ],
)
def test_the_arguments_of_a_server_are_found(start):
    assert read_words([*start, *ARGUMENTS]).command.arguments == ARGUMENTS


def test_one_quoted_string_is_a_command_line():
    assert read_words([shlex.join(["vllm", "serve", *ARGUMENTS])]).command.arguments == ARGUMENTS


@given(st.lists(st.text(min_size=1).filter(lambda word: word.strip() and "\0" not in word), min_size=1))
def test_quoting_a_command_line_changes_nothing(words):
    assert read_words([shlex.join(["vllm", "serve", *words])]) == read_words(["vllm", "serve", *words])


def test_variables_in_front_are_the_servers_environment():
    typed = read_words(["VLLM_PLUGINS=a,b", "EMPTY=", "vllm", "serve", "MODEL"])

    assert typed.environment == {"VLLM_PLUGINS": "a,b", "EMPTY": ""}
    assert typed.command.arguments == ("MODEL",)


def test_an_argument_with_an_equals_sign_is_no_variable():
    assert read_words(["vllm", "serve", "A=b"]).environment == {}


@pytest.mark.parametrize("words", [[], [""], ["  "]])
def test_without_words_there_is_no_command(words):
    assert read_words(words) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["vllm"], "vllm alone, which starts no server"),
        (["vllm", "bench", "latency"], "vllm bench, which starts no server"),
        (["python", "-m", "vllm.entrypoints.cli.main", "chat"], "vllm chat, which starts no server"),
        (["python", "server.py"], "runs Python, but not -m vllm.entrypoints.openai.api_server"),
        (["python", "-m"], "runs Python, but not -m"),
        (["python", "-m", "some.module", "MODEL"], "runs Python, but not -m"),
        (["numactl", "-N", "0", "vllm", "serve", "MODEL"], "leave out what stands before vllm"),
        (["A=b"], "starts nothing"),
        (["env"], "starts nothing"),
        (["vllm serve 'MODEL"], "No closing quotation"),
    ],
)
def test_what_starts_no_server_is_refused_with_what_would_do(words, expected):
    with pytest.raises(DoctorError, match=expected) as caught:
        read_words(words)
    assert "\n" not in str(caught.value)
