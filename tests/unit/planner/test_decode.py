import pytest

from vllm_kvpp.plan import plan_exchange
from vllm_kvpp.planner.decode import describe_queries

LAYERS, HEADS, PEER_HEADS = 61, 128, 112
QUERY_AND_OUTPUT = 576 + 512


@pytest.fixture
def decode(plan):
    return lambda **options: plan("deepseek-v3", **{"gpu": "h200", **options}).owner_decode


def test_a_step_moves_queries_and_outputs_of_the_other_ranks_heads(decode):
    assert decode(num_requests=8).moved_bytes == LAYERS * 8 * PEER_HEADS * QUERY_AND_OUTPUT * 2


def test_what_is_moved_does_not_grow_with_the_history(decode):
    short, long = (decode(num_requests=2, context=context) for context in (1000, 100_000))

    assert short.moved_bytes == long.moved_bytes
    assert short.link_seconds == long.link_seconds


def test_the_time_on_the_link_is_that_of_the_bytes(decode):
    found = decode(link="450")

    assert found.link_seconds == pytest.approx(found.moved_bytes / 450e9)


def test_on_a_device_that_reads_longer_than_it_computes_owners_take_no_longer_than_all_ranks(decode):
    # An H200 reads 1,152 bytes of a latent in 0.3 ns, in which it computes 128 heads.
    found = decode(num_requests=8, context=100_000)

    assert found.exposed_seconds == pytest.approx(found.link_seconds)


def test_on_a_device_that_computes_slowly_the_other_ranks_wait(decode):
    # An H20 reads as fast, and has about a seventh of the operations.
    found = decode(gpu="h20", kv_memory="100GiB", num_requests=8, context=100_000)
    operations = 2 * 8 * (100_000 + 0.5) * QUERY_AND_OUTPUT * HEADS
    reads = 8 * 100_000 * 1152 / (4000e9 * 0.8)
    extra = LAYERS * (operations / (296e12 * 0.5) - reads)

    assert found.exposed_seconds == pytest.approx(found.link_seconds + extra)


def test_without_a_device_or_a_link_times_are_not_known(plan):
    found = plan("deepseek-v3", kv_memory="40GiB").owner_decode

    assert found.moved_bytes > 0
    assert (found.link_seconds, found.exposed_seconds) == (None, None)


@pytest.mark.parametrize("options", [{"decode": "transfer"}, {"kv_memory": "40GiB", "tp_size": 4, "pcp_size": 2}])
def test_there_is_none_where_it_is_not_wanted_or_ranks_have_other_tokens(decode, options):
    assert decode(**options) is None


def test_heads_that_do_not_divide_have_no_queries(model, plan):
    parallelism = plan("deepseek-v3", kv_memory="40GiB", tp_size=4).parallelism

    assert describe_queries(model(num_attention_heads=6), parallelism, "bfloat16") is None


def test_an_indexer_adds_its_choices(plan):
    found = plan("deepseek-v3.2", kv_memory="40GiB")

    assert describe_queries(found.model, found.parallelism, "bfloat16").choice_bytes == 2048 * 4


def test_on_cpus_ranks_keep_the_memory_of_the_exchange_as_the_runtime_does(plan):
    options = {"kv_memory": "1GiB", "block_size": 16, "transport": "shared-memory"}
    with_exchange, without = plan("deepseek-v3", **options), plan("deepseek-v3", decode="transfer", **options)
    queries = describe_queries(with_exchange.model, with_exchange.parallelism, "bfloat16")
    tails = [found.capacity.stages[0].tail_bytes for found in (with_exchange, without)]

    assert tails[0] - tails[1] == plan_exchange(queries, 1024**3) > 0
    assert with_exchange.capacity.num_blocks < without.capacity.num_blocks


def test_on_devices_ranks_keep_it_only_if_it_is_asked_for(plan):
    tails = {
        decode: plan("deepseek-v3", kv_memory="1GiB", block_size=16, decode=decode).capacity.stages[0].tail_bytes
        for decode in ("transfer", "auto", "owner")
    }

    assert tails["transfer"] == tails["auto"] < tails["owner"]


def test_the_report_shows_it_beside_the_transfer_and_says_that_no_device_can_yet(plan, render):
    printed = render(plan("deepseek-v3", gpu="h200", num_requests=8))

    assert "at the owner instead: moved" in printed
    assert "118.9 MB" in printed
    assert "None on a device has been shown to" in " ".join(printed.split())
