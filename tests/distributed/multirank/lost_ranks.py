"""What ranks do while one of them is lost: end, sleep or raise alone in the last step, or look what comes of it."""

import os
import signal
import time
from dataclasses import dataclass, replace
from functools import partial

from multirank.exchanges import LostExchange
from multirank.rank import Rank
from multirank.rank_caches import KVPPCaches
from multirank.reads import LostReads
from multirank.scenarios import Scenario, make_caches, make_group
from multirank.toy_model import embed
from multirank.toy_scheduler import ScheduledRequest, ToyStep
from vllm_kvpp.errors import KVPPTransferError
from vllm_kvpp.runtime.history import Step
from vllm_kvpp.selection import BlockRuns, Selection, Way
from vllm_kvpp.transport.base import PendingTransfer

EXIT_CODE = 7
_LONG_SECONDS = 600


@dataclass(frozen=True)
class Loss:
    """The error that a survivor got, and how long its step had been running."""

    message: str
    seconds: float


def survive(rank: Rank, scenario: Scenario) -> Loss:
    """Run all steps; the last one has to fail, and after it the rank's own state has to be usable.

    Where decode reads in place, nothing is written any more.
    """
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
    if scenario.setup.reads_in_place:
        return _be_refused(caches, new_prompt, loss)
    assert caches.run(new_prompt, embed(new_prompt)) is not None
    return loss


def _be_refused(caches: KVPPCaches, step: ToyStep, loss: Loss) -> Loss:
    """Fail in another step, too: the lost rank might still read what it writes."""
    try:
        caches.run(step, embed(step))
    except KVPPTransferError:
        return loss
    raise AssertionError("a step wrote what the lost rank might still read")


def end_during_transfer(rank: Rank, scenario: Scenario) -> None:
    """Start the last step's first transfer and end the process with it under way."""
    caches = _run_all_but_last(rank, scenario)
    _start_first_transfer(caches, scenario)
    os._exit(EXIT_CODE)


def be_killed_before_meeting(rank: Rank, scenario: Scenario) -> None:
    """Be killed before the last step."""
    _run_all_but_last(rank, scenario)
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed_between_transfers(rank: Rank, scenario: Scenario) -> None:
    """Be killed when the last step's first transfer has ended, and before the second one."""
    caches = _run_all_but_last(rank, scenario)
    _start_first_transfer(caches, scenario).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_through_step(rank: Rank, scenario: Scenario) -> None:
    """Never start the last step's transfers, and be there for as long as the others are."""
    # Kept: what the rank lets go of, its peers take for gone.
    caches = _run_all_but_last(rank, scenario)
    time.sleep(_LONG_SECONDS)
    del caches


def be_lost_in_exchange(rank: Rank, scenario: Scenario, call: str, layer_index: int, is_stuck: bool) -> None:
    """Be killed in the last step, or be stuck, as a layer's gather or scatter would begin."""
    num_earlier = sum(step.has_history for step in scenario.steps[:-1]) * len(scenario.layers)
    lose = partial(
        LostExchange, call=call, number=num_earlier + layer_index, instead=_be_stuck if is_stuck else _be_killed
    )
    decode = scenario.setup.decode
    assert decode is not None
    setup = scenario.setup.with_decode(decode.wrapped(lambda exchange, _: lose(exchange)))
    caches = _run_all_but_last(rank, replace(scenario, setup=setup))
    caches.run(scenario.steps[-1], embed(scenario.steps[-1]))


def be_lost_in_place(rank: Rank, scenario: Scenario, step: int, call: str, number: int, is_stuck: bool) -> None:
    """Be killed in one of the steps that read in place, or be stuck, at the place `number`: see `LostReads`."""
    instead = _be_stuck if is_stuck else _be_killed
    lose = partial(LostReads, step=step, call=call, number=number, instead=instead)
    decode = scenario.setup.decode
    assert decode is not None
    setup = scenario.setup.with_decode(decode.with_reads_wrapped(lambda reads, _: lose(reads)))
    caches = make_caches(replace(scenario, setup=setup), make_group(rank, scenario))
    for scheduled in scenario.steps:
        caches.run(scheduled, embed(scheduled))


def _be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _be_stuck() -> None:
    time.sleep(_LONG_SECONDS)


def disagree(rank: Rank, scenario: Scenario, blocks: BlockRuns) -> str:
    """Read `blocks` in the last step, whatever the others read, and return the error."""
    group = make_group(rank, scenario)
    caches = _run_all_but_last(rank, scenario)
    message = "no error"
    try:
        with caches.transfers.step(Step(blocks)):
            caches.transfers.start_forward()
            for layer in caches.target_layers:
                caches.transfers.before_layer(layer.names[0])
    except KVPPTransferError as error:
        message = str(error)
    # Nobody lets go of its pipes before all have their error: a rank that is gone is another one.
    group.gather("done")
    return message


def abort_alone(rank: Rank, scenario: Scenario, step: ToyStep) -> None:
    """Run `step`, which aborts, where the others run the last one."""
    caches = _run_all_but_last(rank, scenario)
    assert caches.run(step, embed(step)) is None
    time.sleep(_LONG_SECONDS)


def _start_first_transfer(caches: KVPPCaches, scenario: Scenario) -> PendingTransfer:
    blocks = BlockRuns.of(scenario.steps[-1].active_blocks)
    caches.transport.prepare(Selection(Way.WHOLE if scenario.setup.transfer == "full" else Way.RUNS, blocks))
    return caches.transport.start(caches.target_layers[0].memory)


def _run_all_but_last(rank: Rank, scenario: Scenario) -> KVPPCaches:
    caches = make_caches(scenario, make_group(rank, scenario))
    for step in scenario.steps[:-1]:
        caches.run(step, embed(step))
    return caches
