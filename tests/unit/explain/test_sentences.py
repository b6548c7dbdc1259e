import pytest

from vllm_kvpp.explain.sentences import describe_kvpp, describe_relation, describe_scope

KVPP_BLOCK = (
    "KVPP group rank 0 of 2",
    "  owned layers     0–3 (4 of 8)",
    "  blocks           1,206 of 16 tokens",
    "  tokens           19,296 (without KVPP 14,560; factor 1.33)",
)


@pytest.fixture
def scope(explained):
    return lambda lines: " ".join(describe_scope(explained(lines)))


@pytest.fixture
def relation(explained):
    return lambda lines, **hints: " ".join(describe_relation(explained(lines, **hints)))


@pytest.fixture
def kvpp(explained):
    return lambda lines, **hints: " ".join(describe_kvpp(explained(lines, **hints)))


def test_tokens_are_said_to_be_of_the_engine_and_memory_of_a_rank(scope, write):
    said = scope(write.gpu_log())

    assert "of the whole engine, not of one rank: the 8 ranks" in said
    assert "each rank keeps a full copy of every layer" in said
    assert "The memory is of one rank" in said
    assert "only the first rank of each node says its memory" in said


def test_where_every_rank_says_its_memory_none_is_unseen(scope, write):
    log = [write.engine(device="cpu"), write.cpu_memory(rank=0, pid=1, gib=1), write.pool()]

    assert "may have less" not in scope(log)


def test_pipeline_stages_are_named(scope, write):
    assert "the 2 pipeline stages" in scope(write.gpu_log(pp=2))


def test_several_engines_are_added_up(scope, write):
    pools = [write.pool(tokens=1000, length=10, process=f"EngineCore_DP{rank}", pid=rank) for rank in (0, 1)]

    assert "2 engines say theirs, each with a cache of its own: 2,000 tokens together" in scope(pools)


def test_one_engine_of_several_is_said_to_be_one(scope, write):
    assert "The server has 4 engines" in scope(write.gpu_log(dp=4))


def test_memory_without_a_pool_says_that_lines_are_missing(scope, write):
    assert "not what fits into it" in scope([write.engine(), write.gpu_memory(gib=1)])


def test_tokens_are_said_to_follow_from_the_concurrency(relation, write):
    said = relation(write.gpu_log())

    assert "11,173 blocks ÷ 64 blocks of a request of 4,096 tokens = 174.58" in said
    assert "stay empty" not in said
    assert "Requests of 4,096 tokens that run at once: 174." in said


def test_what_a_request_wastes_is_said(relation, write):
    # 11,173 blocks, 63 of which hold a request of 4,000 tokens.
    log = [write.engine(length=4000), write.gpu_memory(gib=46.8), write.pool(tokens=709_396, length=4000)]
    said = relation(log)

    assert "takes 63 whole blocks, which hold 4,032; 32 stay empty" in said
    assert "All blocks full are 715,072 tokens" in said


def test_a_block_that_is_held_back_can_cost_a_whole_request(relation, write):
    log = [write.engine(), write.gpu_memory(gib=46.8), write.pool(tokens=8192, concurrency=2.0)]

    assert "that run at once: 1." in relation(log)


def test_figures_of_an_earlier_release_are_said_to_differ(relation, write):
    sizes = [write.old_size(tokens=715_072), write.old_concurrency(length=4000, concurrency=11_173 / 63)]
    said = relation([write.engine(length=4000), write.gpu_memory(gib=46.8), *sizes])

    assert "715,072 tokens ÷ 4,000 = 178.77, but the concurrency is 177.35" in said
    assert "blocks times block size" in said


def test_without_a_plan_the_figures_are_not_worked_back(relation, write):
    said = relation(write.gpu_log(model="somebody/unknown"))

    assert "715,072 tokens ÷ 4,096 = 174.58" in said
    assert "blocks ÷" not in said


def test_a_memory_line_alone_has_no_relation(relation, write):
    assert relation([write.gpu_memory(gib=1)]) == ""


def test_what_kvpp_would_give_is_said_with_the_lines_that_vllm_would_print(kvpp, write):
    said = kvpp(write.gpu_log())

    assert "would hold 4,356,224 tokens instead of 715,072, 6.09 times as many, on a group of 8 ranks" in said
    assert "--additional-config '{\"enable_kvpp\": true}'" in said
    assert "KV cache size: 4,356,224 tokens, Maximum concurrency for 4,096 tokens per request: 1063.53x" in said
    assert "Beware" not in said


def test_a_log_that_contradicts_the_plan_is_said_to(kvpp, write):
    said = kvpp([*write.gpu_log()[:-1], write.pool(tokens=600_000)])

    assert "Beware: without KVPP the plan finds 715,072 tokens where the log has 600,000" in said


def test_where_kvpp_does_not_pay_it_is_said(kvpp, write):
    log = [write.engine(model="zai-org/GLM-4.7-Flash", tp=2, pp=16), write.gpu_memory(gib=40), write.pool()]

    assert "KVPP does not pay here" in kvpp(log)


def test_what_kvpp_gave_is_said_from_its_own_lines(kvpp, write):
    said = kvpp([*write.gpu_log(), "KVPP is on: group size 2.", *KVPP_BLOCK])

    assert "KVPP is on, group size 2" in said
    assert "19,296 tokens, where the same memory would hold 14,560 without it: 1.33 times as many" in said


def test_kvpp_without_its_block_is_still_said_to_be_on(kvpp, write):
    assert kvpp([*write.gpu_log(), "KVPP is on: group size 4."]).startswith("KVPP is on, group size 4")


def test_a_switch_that_nobody_read_is_told(kvpp, write):
    arguments = write.arguments(more=", 'additional_config': {'enable_kvpp': True}")
    said = kvpp([arguments, *write.gpu_log()[1:]])

    assert "the plugin was not loaded" in said
    assert "vllm-kvpp doctor" in said


def test_a_switch_without_effect_is_told(kvpp, write):
    assert "the group has 1 rank" in kvpp([*write.gpu_log(), "WARNING enable_kvpp has no effect: the KVPP group has 1"])


def test_without_a_plan_the_reason_is_said(kvpp, write):
    said = kvpp(write.gpu_log(model="somebody/unknown"))

    assert "No gain is worked out: the configuration of somebody/unknown" in said
