"""What is special to an exchange through shared memory; what all have in common stands in test_exchange."""

import time

import pytest
import torch


@pytest.mark.parametrize("owner_rank", range(3))
def test_ranks_with_different_numbers_of_rows_all_get_an_error(make_peer_ranks, owner_rank):
    ranks = make_peer_ranks(timeout_seconds=60.0)
    num_rows = (2, 3, 2)
    for exchange, count in zip(ranks.exchanges, num_rows, strict=True):
        exchange.prepare(count)

    def attend(rank):
        try:
            ranks.attend(rank, owner_rank, num_rows[rank])
        finally:
            # As a rank that ends with its error.
            ranks.signals[rank].close()

    errors = ranks.run_everywhere(attend)
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert "does not move the same in this step" in str(errors[owner_rank])


def test_a_rank_at_another_place_of_the_step_is_named(make_peer_ranks):
    ranks = make_peer_ranks()
    ranks.prepare(2)
    ranks.exchanges[1].gather(0, ranks.make_query(1, 2))
    # Rank 2 has been to another owner before.
    for owner_rank in (1, 0):
        ranks.exchanges[2].gather(owner_rank, ranks.make_query(2, 2))

    with pytest.raises(RuntimeError, match=r"^group rank 2 does not move the same in this step"):
        ranks.exchanges[0].gather(0, ranks.make_query(0, 2))


def test_a_peer_that_is_gone_is_noticed_at_once_by_the_owner(make_peer_ranks):
    ranks = make_peer_ranks(timeout_seconds=60.0)
    ranks.prepare(2)
    ranks.signals[1].close()
    ranks.exchanges[2].gather(0, ranks.make_query(2, 2))

    with pytest.raises(RuntimeError, match=r"^group rank 1 is gone$"):
        ranks.exchanges[0].gather(0, ranks.make_query(0, 2))


def test_an_owner_that_is_gone_is_noticed_at_once_by_who_waits_for_its_output(make_peer_ranks):
    ranks = make_peer_ranks(timeout_seconds=60.0)
    ranks.prepare(2)
    ranks.exchanges[2].gather(0, ranks.make_query(2, 2))
    ranks.signals[0].close()

    with pytest.raises(RuntimeError, match=r"^group rank 0 is gone$"):
        ranks.exchanges[2].scatter(0, None)


def test_an_owner_that_is_gone_is_noticed_by_who_sends_it_a_query(make_peer_ranks):
    ranks = make_peer_ranks()
    ranks.prepare(2)
    ranks.signals[0].close()

    with pytest.raises(RuntimeError, match=r"^group rank 0 is gone$"):
        ranks.exchanges[2].gather(0, ranks.make_query(2, 2))


def test_a_peer_that_never_comes_is_named_at_the_limit(make_peer_ranks):
    ranks = make_peer_ranks(timeout_seconds=0.1)
    ranks.prepare(2)
    ranks.exchanges[2].gather(0, ranks.make_query(2, 2))
    started = time.monotonic()

    with pytest.raises(TimeoutError, match=r"^nothing from group rank 1 within 0\.1 s$"):
        ranks.exchanges[0].gather(0, ranks.make_query(0, 2))
    assert time.monotonic() - started < 2


def test_an_owner_that_never_answers_is_named_at_the_limit(make_peer_ranks):
    ranks = make_peer_ranks(timeout_seconds=0.1)
    ranks.prepare(2)
    ranks.exchanges[2].gather(0, ranks.make_query(2, 2))

    with pytest.raises(TimeoutError, match=r"^nothing from group rank 0 within 0\.1 s$"):
        ranks.exchanges[2].scatter(0, None)


def test_choices_that_never_come_are_missed_at_the_limit(make_peer_ranks):
    ranks = make_peer_ranks(timeout_seconds=0.1)
    ranks.prepare(2)

    with pytest.raises(TimeoutError, match=r"^nothing from group rank 0 within 0\.1 s$"):
        ranks.exchanges[2].share(0, torch.zeros(2, 2, dtype=torch.int32))


def test_a_peer_waits_for_the_owner_only(make_peer_ranks):
    ranks = make_peer_ranks()
    ranks.prepare(2)
    for rank in (1, 2):
        ranks.exchanges[rank].gather(0, ranks.make_query(rank, 2))
    ranks.exchanges[0].scatter(0, ranks.exchanges[0].gather(0, ranks.make_query(0, 2)).new_zeros(2, 6, 4))
    ranks.signals[1].close()

    assert ranks.exchanges[2].scatter(0, None).shape == (2, 2, 4)
