import asyncio
import os
import signal

import pytest

from vllm_kvpp.demo.interrupts import Interrupted, Interrupts


def test_a_signal_ends_an_allowed_section(interrupts):
    with pytest.raises(Interrupted) as caught, interrupts.allowed():
        os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.exit_code == 130


def test_sigterm_has_an_exit_code_of_its_own(interrupts):
    with pytest.raises(Interrupted, match="SIGTERM") as caught, interrupts.allowed():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == 143


def test_outside_an_allowed_section_a_signal_waits_for_the_next_one(interrupts):
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted), interrupts.allowed():
        pytest.fail("the section ran")


def test_a_second_signal_does_not_disturb_the_way_out(interrupts):
    way_out = []

    def leave():
        with interrupts.allowed():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                way_out.append("done")

    with pytest.raises(Interrupted):
        leave()
    assert way_out == ["done"]


def test_a_signal_ends_asynchronous_work(interrupts):
    async def work():
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)

    with pytest.raises(Interrupted), interrupts.allowed():
        asyncio.run(work())


def test_the_handlers_that_were_there_before_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
