import pytest

from vllm_kvpp.plan import plan_exchange
from vllm_kvpp.planner.decode import describe_queries
from vllm_kvpp.planner.document import make_document
from vllm_kvpp.planner.errors import PlannerError

LAYERS, HEADS, PEER_HEADS = 61, 128, 112
QUERY_AND_OUTPUT = 576 + 512
ON_CPUS = {"kv_memory": "1GiB", "block_size": 16, "context": 1000, "transport": "shared-memory"}


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


@pytest.fixture
def kept(plan):
    """What a rank keeps for transfers and decode queries."""
    return lambda model, **options: plan(model, **options).capacity.stages[0].tail_bytes


@pytest.mark.parametrize(("model", "decode"), [("deepseek-v3", "owner"), ("deepseek-v3.2", "auto")])
def test_on_cpus_ranks_keep_the_memory_of_the_exchange_as_the_runtime_does(model, decode, plan, kept):
    found = plan(model, decode=decode, **ON_CPUS)
    queries = describe_queries(found.model, found.parallelism, "bfloat16")

    assert kept(model, decode=decode, **ON_CPUS) - kept(model, decode="transfer", **ON_CPUS) == plan_exchange(
        queries, 1024**3
    )
    assert plan_exchange(queries, 1024**3) > 0


@pytest.mark.parametrize("decode", ["auto", "in_place"])
def test_ranks_that_read_in_place_keep_no_memory_for_queries(decode, plan, kept):
    assert plan("deepseek-v3", decode=decode, **ON_CPUS).decodes_in_place
    assert kept("deepseek-v3", decode=decode, **ON_CPUS) == kept("deepseek-v3", decode="transfer", **ON_CPUS)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("deepseek-v3", {"transport": "broadcast"}),
        ("deepseek-v3", {"tp_size": 4, "pcp_size": 2}),
        ("deepseek-v3", {"decode": "owner"}),
        ("deepseek-v3", {"decode": "transfer"}),
        ("deepseek-v3.2", {}),
    ],
)
def test_decode_reads_in_place_only_where_it_can_and_may(model, changes, plan):
    assert not plan(model, **{**ON_CPUS, **changes}).decodes_in_place


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        (
            "deepseek-v3",
            {"transport": "broadcast"},
            "--transport is broadcast.*; use --transport shared-memory on CPUs",
        ),
        ("deepseek-v3.2", {}, "deepseek-ai/DeepSeek-V3.2 has sparse attention.*; use --decode auto, owner or transfer"),
        ("deepseek-v3", {"tp_size": 4, "pcp_size": 2}, "--pcp is 2.*; use --pcp 1, or --decode auto"),
    ],
)
def test_reading_in_place_where_it_cannot_be_is_refused(model, changes, expected, plan):
    with pytest.raises(PlannerError, match=f"--decode is in_place, but {expected}"):
        plan(model, decode="in_place", **{**ON_CPUS, **changes})


@pytest.mark.parametrize(("decode", "expected"), [("auto", True), ("transfer", False)])
def test_the_document_says_whether_decode_reads_in_place(decode, expected, plan):
    assert make_document(plan("deepseek-v3", decode=decode, **ON_CPUS))["decode_in_place"] is expected


def test_the_report_of_decode_in_place_moves_nothing_and_compares_with_the_other_ways(plan, render):
    lines = render(plan("deepseek-v3", **ON_CPUS)).splitlines()
    (index,) = (number for number, line in enumerate(lines) if "│ read in place: moved" in line)

    assert [line.split("│")[2].strip() for line in lines[index : index + 3]] == ["0 bytes", "0 ms", "14.9 MB"]
    assert "at the owner instead: moved" in lines[index + 2]
    assert "│ moved" in lines[index - 4]
    assert any("what transfers would take instead" in line for line in lines)


def test_the_report_has_no_row_of_decode_in_place_where_it_moves_history(plan, render):
    assert "in place" not in render(plan("deepseek-v3", **{**ON_CPUS, "transport": "broadcast"}))


def test_the_verdict_on_decode_in_place_is_that_nothing_is_moved_and_prefill_moves_history(plan):
    decode, prefill = (
        line for line in make_document(plan("deepseek-v3", **ON_CPUS))["verdicts"] if "tokens of history" in line
    )

    assert decode.endswith("every rank reads the owners' memory in place, so nothing is moved.")
    assert "Prefill" in prefill
    assert "in place" not in prefill


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
