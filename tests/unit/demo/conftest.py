import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from vllm_kvpp.demo.capacity import ExpectedCapacity
from vllm_kvpp.demo.client import Answer, CacheSize
from vllm_kvpp.demo.interrupts import Interrupts
from vllm_kvpp.demo.machine import choose_port
from vllm_kvpp.demo.questions import NUM_WORDS, make_batches
from vllm_kvpp.demo.results import DemoResult, KVPPRun, RankReport, ServerRun
from vllm_kvpp.demo.server import ServerCommand

HERE = Path(__file__).parent


@pytest.fixture
def make_fake(tmp_path):
    """Makes the command of a fake server; `read_pids` of it lists the processes it started."""

    def make(mode):
        port = choose_port(None)
        return ServerCommand(
            argv=(sys.executable, str(HERE / "fake_server.py"), str(port), mode, str(tmp_path / "pids")),
            env={**os.environ, "FAKE_BLOCKS_ON": "30", "FAKE_BLOCKS_OFF": "20"},
            port=port,
            log_path=tmp_path / "server.log",
        )

    return make


@pytest.fixture
def read_pids(tmp_path):
    def read(name="pids"):
        return [int(line) for line in (tmp_path / name).read_text().split()]

    return read


@pytest.fixture
def list_running():
    def running(pids):
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    return running


@pytest.fixture
def interrupts():
    with Interrupts() as entered:
        yield entered


@pytest.fixture
def start_demo(tmp_path):
    """Starts `vllm-kvpp demo` over fake servers, with a temporary folder of its own."""
    (tmp_path / "tmp").mkdir()
    started = []

    def start(*arguments, on="kvpp", off="plain"):
        process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_demo.py"), on, off, str(tmp_path / "pids-"), *arguments],
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture
def result():
    """A result in which every claim holds."""
    questions = tuple(question for batch in make_batches(4) for question in batch)
    right = tuple(_answer(question.continuation(NUM_WORDS)) for question in questions)
    wrong = tuple(_answer(f"{question.answer} oslo", logprob=-3.0) for question in questions)
    server = ServerRun(
        cache=CacheSize(num_blocks=1210, block_size=16),
        cache_bytes=(1000, 990),
        answers=right,
        start_seconds=20.0,
        answer_seconds=5.0,
    )
    report = RankReport(
        group_rank=0,
        num_layers=8,
        num_blocks=1210,
        steps=13,
        steps_with_history=11,
        steps_with_transfers=4,
        transfers=32,
        transferred_bytes=123000,
        steps_at_owner=7,
        exchanges=56,
        exchanged_bytes=456,
        steps_in_place=1,
    )
    return DemoResult(
        tp_size=2,
        kv_cache_bytes=1024,
        expected=ExpectedCapacity(num_blocks_off=910, num_blocks_on=1210, formula_factor=8 / 6),
        questions=questions,
        on=KVPPRun(
            server=server,
            reports=(report, replace(report, group_rank=1)),
            broken_answers=wrong,
            broken_bytes=0,
            mended_answers=right,
        ),
        off=replace(server, cache=CacheSize(num_blocks=910, block_size=16), cache_bytes=(1001, 1001)),
    )


def _answer(text, logprob=-0.25):
    words = (text.split() + ["oslo"] * NUM_WORDS)[:NUM_WORDS]
    return Answer(
        text=" ".join(words), token_ids=tuple(sum(word.encode()) for word in words), logprobs=(logprob,) * NUM_WORDS
    )
