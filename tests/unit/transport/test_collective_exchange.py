"""What is special to an exchange by collectives; what all have in common stands in test_exchange."""

from types import SimpleNamespace

import pytest
import torch

from vllm_kvpp.transport.collective_exchange import GLOO_EXCHANGE, CollectiveExchange


def test_an_attention_is_one_gather_and_one_scatter(make_collective_ranks, collectives):
    ranks = make_collective_ranks()
    ranks.prepare(2)
    ranks.attend_everywhere(1, 2)

    assert sorted(collectives.calls) == [(rank, call) for rank in range(3) for call in ("gather", "scatter")]


def test_the_queries_of_others_arrive_before_the_owner_has_its_own(make_collective_ranks, collectives):
    ranks = make_collective_ranks()
    ranks.prepare(2)

    def attend(rank):
        exchange = ranks.exchanges[rank]
        if rank != 1:
            return ranks.attend(rank, 1, 2)
        exchange.begin_gather()
        collectives.works[1].result(timeout=5)
        # What it computes from here on is written over nothing that has arrived.
        return ranks.attend(rank, 1, 2)

    gathered, output = ranks.run_everywhere(attend)[1]
    assert torch.equal(gathered, ranks.all_queries(2))
    assert torch.equal(output, ranks.expected_output(1, 2))
    assert sorted(collectives.calls) == [(rank, call) for rank in range(3) for call in ("gather", "scatter")]


def test_after_a_step_that_failed_within_a_gather_the_ranks_are_known_to_be_apart(make_collective_ranks, collectives):
    (exchange, *_) = make_collective_ranks().exchanges
    exchange.prepare(2)
    exchange.begin_gather()
    with pytest.raises(RuntimeError, match=r"^the gather of a step that failed is still under way$"):
        exchange.prepare(2)
    collectives.give_up()


def test_choices_are_one_broadcast(make_collective_ranks, collectives):
    ranks = make_collective_ranks()
    ranks.prepare(2)
    ranks.run_everywhere(lambda rank: ranks.exchanges[rank].share(1, torch.zeros(2, 2, dtype=torch.int32)))

    assert sorted(collectives.calls) == [(rank, "broadcast") for rank in range(3)]


def test_the_owner_keeps_its_own_choices(make_collective_ranks):
    ranks = make_collective_ranks()
    ranks.prepare(1)
    choices = torch.tensor([[5, 6]], dtype=torch.int32)
    ranks.run_everywhere(
        lambda rank: ranks.exchanges[rank].share(0, choices if rank == 0 else torch.zeros(1, 2, dtype=torch.int32))
    )

    assert choices.tolist() == [[5, 6]]


@pytest.mark.parametrize("call", ["gather", "scatter", "broadcast"])
def test_a_lost_rank_is_reported_as_the_backend_reports_it(make_collective_ranks, collectives, monkeypatch, call):
    failure = RuntimeError("Connection closed by peer")

    def fail(*args, **kwargs):
        raise failure

    (exchange, *_) = make_collective_ranks().exchanges
    exchange.prepare(2)
    monkeypatch.setattr(collectives, call, fail)
    use = {
        "gather": lambda: exchange.gather(1, (torch.zeros(2, 2, 3),)),
        "scatter": lambda: exchange.scatter(1, None),
        "broadcast": lambda: exchange.share(1, torch.zeros(2, 2, dtype=torch.int32)),
    }
    with pytest.raises(RuntimeError) as caught:
        use[call]()
    assert caught.value is failure


def test_its_price_may_be_that_of_another_link(make_collective_ranks, collectives):
    (exchange, *_) = make_collective_ranks().exchanges
    dear = SimpleNamespace(layer_bytes=7)

    assert exchange.traits == GLOO_EXCHANGE
    assert CollectiveExchange(SimpleNamespace(rank=0), exchange._area, dear).traits is dear
