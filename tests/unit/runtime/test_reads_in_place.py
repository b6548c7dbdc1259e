"""Decode rows that read the owner's memory in place: what is waited for, in which order, and what is refused."""

import pytest

from vllm_kvpp.errors import KVPPOrderError, KVPPTransferError
from vllm_kvpp.runtime.counters import TransferCounters
from vllm_kvpp.runtime.history import DecodeRows, Step, StepRequest
from vllm_kvpp.selection import BlockRuns

DECODE = Step(BlockRuns.of([0, 1]), (StepRequest(1, 3, 1, [0]), StepRequest(1, 2, 1, [1])))
TWO_ROWS = DecodeRows(2, 2)
MIXED = Step(BlockRuns.of([0, 1]), (StepRequest(1, 3, 1, [0]), StepRequest(5, 2, 1, [1])))
ONE_ROW = DecodeRows(1, 1)
FIRST_PREFILL = Step(BlockRuns(), (StepRequest(5, 0, 0, [0]),))


class FakeReads:
    """Messages that are written down; `failures` says which fail, and how."""

    def __init__(self):
        self.log = []
        self.failures = {}

    def prepare(self, num_rows):
        self._note(f"prepare {num_rows}")

    def tell_written(self, number):
        self._note(f"tell_written {number}")

    def await_written(self, owner_rank, number):
        self._note(f"await_written {owner_rank} {number}")

    def tell_read(self):
        self._note("tell_read")

    def begin_step(self):
        self._note("begin_step")

    def _note(self, call):
        self.log.append(call)
        if call.split()[0] in self.failures:
            raise self.failures[call.split()[0]]


@pytest.fixture
def reads():
    return FakeReads()


@pytest.fixture
def make_both(make_stage, make_decode, reads):
    """A stage of three layers, of which ranks 0, 1, and 0 are the owners; and its decode."""

    def make_both(mode="in_place", **changes):
        decode, exchange = make_decode(mode=mode, reads=reads, **changes)
        return make_stage(decode=decode), decode, exchange

    return make_both


def run_step(stage, decode, step=DECODE, rows=TWO_ROWS, *, numbers=(0, 1, 2), writes=True, error=None):
    """Reach layers as a forward does: wait for the cache, update it, attend; end with `error`."""
    with stage.transfers.step(step):
        stage.transfers.start_forward(rows)
        for number in numbers:
            for name in stage.layers[number].names:
                stage.transfers.before_layer(name)
            name = f"layers.{number}.attn"
            if writes:
                decode.after_write(name)
            if decode.reads_in_place:
                decode.before_read(name, rows.num_rows)
        if error is not None:
            raise error


@pytest.mark.parametrize("mode", ["in_place", "auto"])
def test_an_owner_tells_what_it_has_written_and_waits_for_what_others_have(make_both, reads, mode):
    stage, decode, exchange = make_both(mode, rank=0)
    run_step(stage, decode)

    assert reads.log == [
        *("begin_step", "prepare 2"),
        *("tell_written 0", "await_written 1 1", "tell_written 2"),
        "tell_read",
    ]
    assert (stage.calls, exchange.log) == ([], [])


def test_a_rank_that_owns_nothing_waits_for_each_owner(make_both, reads):
    stage, decode, _ = make_both(rank=2)
    run_step(stage, decode)

    assert reads.log[2:-1] == ["await_written 0 0", "await_written 1 1", "await_written 0 2"]


@pytest.mark.parametrize("mode", ["owner", "transfer"])
def test_other_modes_read_nothing_in_place_but_wait_for_the_readers_of_an_earlier_step(make_both, reads, mode):
    stage, decode, _ = make_both(mode)
    with pytest.raises(KVPPOrderError, match="did not"):
        run_step(stage, decode, numbers=())

    assert reads.log == ["begin_step"]


def test_in_place_without_shared_memory_moves_history(make_decode):
    decode, exchange = make_decode(mode="in_place")

    assert decode.begin(DECODE, TWO_ROWS, "auto", TransferCounters()) is None
    assert (decode.is_on, exchange.log) == (False, [])


def test_a_step_without_history_waits_for_the_readers_of_the_last_one_before_it_writes(make_both, reads):
    stage, decode, _ = make_both(rank=0)
    run_step(stage, decode, FIRST_PREFILL, rows=None)

    assert reads.log == ["begin_step"]


@pytest.mark.parametrize(("rank", "told"), [(0, ["tell_written 0", "tell_written 2"]), (1, ["tell_written 1"])])
def test_beside_decodes_the_blocks_of_the_other_requests_move_and_no_more(make_both, reads, rank, told):
    stage, decode, _ = make_both(rank=rank)
    run_step(stage, decode, MIXED, ONE_ROW)

    assert [list(selection.blocks) for selection in stage.transport.prepared] == [[1]]
    assert stage.calls == ["start 0", "wait 0", "start 1", "wait 1", "start 2", "wait 2"]
    assert [call for call in reads.log if call.startswith("tell_written")] == told


@pytest.mark.parametrize(("step", "rows", "left"), [(DECODE, TWO_ROWS, [1]), (MIXED, ONE_ROW, [])])
def test_a_rank_leaves_the_caches_of_others_as_they_are_where_all_requests_decode(make_both, step, rows, left):
    _, decode, _ = make_both(rank=0)
    decode.begin(step, rows, "auto", TransferCounters())

    assert [number for number in range(3) if decode.leaves_cache_as_it_is(f"layers.{number}.attn")] == left


def test_no_rows_are_too_many_to_read_in_place(make_both):
    warnings = []
    _, decode, _ = make_both("auto", max_rows=1, warn=warnings.append)
    decode.begin(DECODE, TWO_ROWS, "auto", TransferCounters())

    assert decode.reads_in_place
    assert warnings == []


def test_steps_in_place_are_counted_and_nothing_is_said_to_have_travelled(make_both):
    stage, decode, _ = make_both(rank=0)
    for step, rows in ((DECODE, TWO_ROWS), (MIXED, ONE_ROW), (FIRST_PREFILL, None)):
        run_step(stage, decode, step, rows)
    counters = stage.transfers.counters

    assert (counters.steps, counters.steps_with_history, counters.steps_in_place) == (3, 2, 2)
    assert (counters.steps_with_transfers, counters.steps_at_owner) == (1, 0)
    assert (counters.exchanges, counters.query_bytes, counters.output_bytes) == (0, 0, 0)


def test_between_steps_nothing_is_told_of_a_write(make_both, reads):
    _, decode, _ = make_both(rank=0)
    decode.after_write("layers.0.attn")

    assert reads.log == []


def test_an_attention_out_of_order_is_refused_before_anything_is_waited_for(make_both, reads):
    stage, decode, _ = make_both(rank=2)

    with pytest.raises(KVPPOrderError, match=r"^layers\.1\.attn was reached out of order .* expected layers\.0\.attn"):
        run_step(stage, decode, numbers=[1])
    assert not any(call.startswith("await_written") for call in reads.log)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_other_rows_than_the_batch_named_are_refused(make_both, num_rows):
    _, decode, _ = make_both(rank=2)
    decode.begin(DECODE, TWO_ROWS, "auto", TransferCounters())

    with pytest.raises(KVPPOrderError, match=rf"^layers\.0\.attn attends {num_rows} decode rows, but .* named 2"):
        decode.before_read("layers.0.attn", num_rows)


def test_an_owner_that_attends_without_having_written_is_refused(make_both):
    stage, decode, _ = make_both(rank=0)

    with pytest.raises(KVPPOrderError, match=r"^layers\.0\.attn attends in decode, but its owner has not written"):
        run_step(stage, decode, writes=False)


def test_what_was_written_in_the_last_step_is_not_taken_for_this_ones(make_both):
    stage, decode, _ = make_both(rank=0)
    run_step(stage, decode)

    with pytest.raises(KVPPOrderError, match=r"^layers\.0\.attn attends in decode, but its owner has not written"):
        run_step(stage, decode, writes=False)


def test_an_attention_that_was_passed_by_is_noticed_at_the_end(make_both):
    stage, decode, _ = make_both(rank=0)

    with pytest.raises(KVPPOrderError, match=r"^layers\.1\.attn did not attend to its owner's memory"):
        run_step(stage, decode, numbers=[0])


def test_a_cache_that_is_written_before_its_turn_is_refused_and_not_told_of(make_both, reads):
    _, decode, _ = make_both(rank=0)
    decode.begin(DECODE, TWO_ROWS, "auto", TransferCounters())

    with pytest.raises(KVPPOrderError, match=r"^layers\.2\.attn was reached out of order .* expected layers\.0\.attn"):
        decode.after_write("layers.2.attn")
    assert reads.log == ["prepare 2"]


def test_a_rank_that_fails_tells_the_others_that_it_reads_no_more(make_both, reads):
    stage, decode, _ = make_both(rank=0)
    with pytest.raises(ZeroDivisionError):
        run_step(stage, decode, numbers=[0, 1], error=ZeroDivisionError())

    assert reads.log[-1] == "tell_read"
    assert not decode.is_on


def test_a_lost_peer_does_not_hide_the_error_of_a_step(make_both, reads):
    stage, decode, _ = make_both(rank=0)
    reads.failures["tell_read"] = RuntimeError("group rank 1 is gone")

    with pytest.raises(ZeroDivisionError):
        run_step(stage, decode, error=ZeroDivisionError())


@pytest.mark.parametrize(
    ("call", "rank", "words"),
    [
        ("begin_step", 0, "Waiting until all ranks had read the last decode step's caches"),
        ("tell_written", 0, "Telling the other ranks that layers.0.attn is written"),
        ("await_written", 1, "Waiting for the owner of layers.0.attn, rank 0, to write it"),
    ],
)
def test_a_lost_rank_is_an_error_that_names_what_was_waited_for(make_both, reads, call, rank, words):
    stage, decode, _ = make_both(rank=rank)
    reads.failures[call] = failure = RuntimeError("group rank 2 is gone")
    with pytest.raises(KVPPTransferError) as caught:
        run_step(stage, decode)

    assert str(caught.value).startswith(f"{words} failed in the KVPP group of ranks [2, 3, 4]: group rank 2 is gone. ")
    assert str(caught.value).endswith("raise kvpp.transfer_timeout_seconds.")
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize(("call", "rank"), [("begin_step", 0), ("await_written", 1)])
def test_a_rank_that_does_not_come_is_an_error_too(make_both, reads, call, rank):
    stage, decode, _ = make_both(rank=rank)
    reads.failures[call] = TimeoutError("nothing from group rank 2 within 5 s")

    with pytest.raises(KVPPTransferError, match="nothing from group rank 2 within 5 s"):
        run_step(stage, decode)
