"""What ranks do while one of them is lost: end, sleep or raise alone in the last step, or look what comes of it."""

import os
import time
from dataclasses import dataclass

from multirank.rank import Rank
from multirank.rank_caches import KVPPCaches
from multirank.scenarios import Scenario, make_caches, make_transport
from multirank.toy_model import embed
from multirank.toy_scheduler import ScheduledRequest, ToyStep
from vllm_kvpp.errors import KVPPTransferError

EXIT_CODE = 7
_LONG_SECONDS = 600


@dataclass(frozen=True)
class Loss:
    """The error that a survivor got, and how long its step had been running."""

    message: str
    seconds: float


def survive(rank: Rank, scenario: Scenario) -> Loss:
    """Run all steps; the last one has to fail, and after it the rank's own state has to be usable."""
    caches = _run_all_but_last(rank, scenario)
    last_step = scenario.steps[-1]
    started = time.monotonic()
    try:
        caches.run(last_step, embed(last_step))
    except KVPPTransferError as error:
        loss = Loss(str(error), time.monotonic() - started)
    else:
        raise AssertionError("the step succeeded without the lost rank")
    new_prompt = ToyStep((ScheduledRequest("new", (1, 2, 3), 0, (1,)),))
    assert caches.run(new_prompt, embed(new_prompt)) is not None
    return loss


def end_during_transfer(rank: Rank, scenario: Scenario) -> None:
    """Start the last step's first transfer and end the process with it under way."""
    caches = _run_all_but_last(rank, scenario)
    caches.transport.start(caches.target_layers[0].memory)
    os._exit(EXIT_CODE)


def sleep_through_step(rank: Rank, scenario: Scenario) -> None:
    """Never start the last step's transfers, and be there for as long as the others are."""
    _run_all_but_last(rank, scenario)
    time.sleep(_LONG_SECONDS)


def abort_alone(rank: Rank, scenario: Scenario, step: ToyStep) -> None:
    """Run `step`, which aborts, where the others run the last one."""
    caches = _run_all_but_last(rank, scenario)
    assert caches.run(step, embed(step)) is None
    time.sleep(_LONG_SECONDS)


def _run_all_but_last(rank: Rank, scenario: Scenario) -> KVPPCaches:
    caches = make_caches(rank, scenario, make_transport(rank, scenario))
    for step in scenario.steps[:-1]:
        caches.run(step, embed(step))
    return caches
