"""Indexers while decode rows attend at the owners: they score there, and share what others need."""

import pytest
import torch

from vllm_kvpp.errors import KVPPOrderError, KVPPTransferError
from vllm_kvpp.runtime.counters import TransferCounters
from vllm_kvpp.runtime.decode_places import OwnedPlace
from vllm_kvpp.runtime.history import DecodeRows, Step, StepRequest
from vllm_kvpp.selection import BlockRuns

TWO_DECODES = Step(BlockRuns.of([1, 2]), (StepRequest(1, 5, 1, [1, 3]), StepRequest(1, 9, 1, [2, 4])))
INDEXER, ATTENTION = "layers.0.indexer", "layers.0.attn"


def sparse_places(*, shares_choices):
    return OwnedPlace(INDEXER, 0, shares_choices=shares_choices), OwnedPlace(ATTENTION, 0)


def begin(decode, counters=None):
    decode.begin(TWO_DECODES, DecodeRows(2, 2), "auto", counters or TransferCounters())


def test_only_the_owner_of_an_indexer_scores(make_decode):
    for rank in (0, 1):
        decode, exchange = make_decode(sparse_places(shares_choices=False), rank=rank, num_choices=16)
        begin(decode)
        scored = []
        decode.choose(INDEXER, torch.zeros(8, 16, dtype=torch.int32), lambda scored=scored: scored.append(True))

        assert scored == [True] * (rank == 0)
        assert exchange.log == ["prepare 2"]


def test_choices_that_others_need_are_shared_for_the_rows_of_the_step(make_decode):
    decode, exchange = make_decode(sparse_places(shares_choices=True), rank=1, num_choices=16)
    begin(decode)
    choices = torch.zeros(8, 16, dtype=torch.int32)
    decode.choose(INDEXER, choices, lambda: pytest.fail("scored where the owner has to"))

    assert exchange.log == ["prepare 2", "share 0"]
    assert (choices[:2] == 1).all()
    assert (choices[2:] == 0).all()


@pytest.mark.parametrize(("rank", "num_peers"), [(0, 2), (1, 1)], ids=["owner", "other"])
def test_shared_choices_are_counted(make_decode, rank, num_peers):
    decode, _ = make_decode(sparse_places(shares_choices=True), rank=rank, num_choices=16)
    counters = TransferCounters()
    begin(decode, counters=counters)
    decode.choose(INDEXER, torch.zeros(8, 16, dtype=torch.int32), lambda: None)

    assert (counters.choice_bytes, counters.exchanges) == (2 * num_peers * 16 * 4, 0)


def test_an_attention_before_the_indexer_of_its_layer_is_refused(make_decode):
    decode, _ = make_decode(sparse_places(shares_choices=False), num_choices=16)
    begin(decode)

    with pytest.raises(KVPPOrderError, match=r"^layers\.0\.attn was reached out of order .* layers\.0\.indexer"):
        decode.attend(ATTENTION, (torch.ones(2, 2, 5),), lambda queries: queries)


def test_choices_that_cannot_be_shared_are_named_like_a_failed_exchange(make_decode):
    decode, exchange = make_decode(sparse_places(shares_choices=True), rank=1, num_choices=16)
    begin(decode)
    exchange.failures["share"] = TimeoutError("nothing within 5 s")

    with pytest.raises(KVPPTransferError, match=r"with the owner of layers\.0\.indexer, rank 0, failed"):
        decode.choose(INDEXER, torch.zeros(8, 16, dtype=torch.int32), lambda: None)


def test_what_an_indexer_raises_is_not_taken_for_a_lost_rank(make_decode):
    decode, _ = make_decode(sparse_places(shares_choices=True), num_choices=16)
    begin(decode)

    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        decode.choose(INDEXER, torch.zeros(8, 16, dtype=torch.int32), fail)
