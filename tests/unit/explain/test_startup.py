import pytest

from vllm_kvpp.explain.log_file import parse_line
from vllm_kvpp.explain.startup import read_startups


@pytest.fixture
def read(write):
    return lambda lines: read_startups([parse_line(line) for line in lines])


def test_settings_come_from_the_engines_line(read, write):
    log = write.gpu_log(pp=2, dp=3, dcp=4, tp=16, dtype="float16", kv_cache_dtype="fp8", length=9999)
    (startup,) = read(log)
    settings = startup.settings

    assert (settings.tp_size, settings.pp_size, settings.dp_size, settings.dcp_size) == (16, 2, 3, 4)
    assert (settings.dtype, settings.kv_cache_dtype, settings.device) == ("float16", "fp8", "cuda")
    assert (settings.max_model_len, settings.vllm_version) == (9999, "0.32.0")
    assert settings.model == "deepseek-ai/DeepSeek-V3"


def test_the_arguments_fill_in_what_only_they_say(read, write):
    more = ", 'prefill_context_parallel_size': 2, 'block_size': 32, 'kv_cache_memory_bytes': 1234"
    (startup,) = read([write.arguments(tp=4, length=77, more=more), write.pool()])
    settings = startup.settings

    assert (settings.tp_size, settings.pcp_size, settings.block_size, settings.kv_cache_bytes) == (4, 2, 32, 1234)
    assert (settings.model, settings.max_model_len) == ("deepseek-ai/DeepSeek-V3", 77)


@pytest.mark.parametrize(
    ("value", "expected"), [("True", True), ("'true'", True), ("1", True), ("False", False), ("'false'", False)]
)
def test_the_switch_is_seen_in_the_arguments(value, expected, read, write):
    more = f", 'additional_config': {{'enable_kvpp': {value}}}"
    (startup,) = read([write.arguments(more=more), write.pool()])

    assert startup.settings.asks_for_kvpp is expected


def test_the_method_of_drafts_is_read(read, write):
    (startup,) = read(write.gpu_log(draft="SpeculativeConfig(method='mtp', model='x', num_spec_tokens=1)"))

    assert startup.settings.draft_method == "mtp"


def test_a_block_size_that_vllm_chose_is_read(read, write):
    line = "(Worker_TP0 pid=3) INFO [interface.py:776] Setting kv cache block size to 128 for FLASHMLA backend(s)."
    (startup,) = read([*write.gpu_log(), line])

    assert startup.settings.block_size == 128


@pytest.mark.parametrize(
    "line",
    [
        "Available KV cache memory: 46.8 GiB",
        "Initial free memory 79.1 GiB, reserved 46.8 GiB memory for KV Cache as specified by kv_cache_memory_bytes",
        "Explicitly set (46.8/92.0) GiB for KV cache on node 0.",
        "Auto set (46.8/92.0) GiB for KV cache on node 0, with 60.0 GiB requested memory for the worker.",
    ],
)
def test_every_line_about_memory_is_read(line, read):
    (startup,) = read([f"(Worker_TP1 pid=3) INFO [x.py:1] {line}"])

    assert [(memory.rank, memory.gib) for memory in startup.memories] == [("Worker_TP1 pid=3", 46.8)]


def test_the_smallest_memory_of_the_ranks_is_found(read, write):
    (startup,) = read([write.cpu_memory(rank=rank, pid=rank, gib=gib) for rank, gib in enumerate((3, 2, 4))])

    assert startup.smallest_memory.gib == 2
    assert len(startup.memories) == 3


def test_a_pool_is_read_from_one_line(read, write):
    (startup,) = read([write.pool(tokens=19_296, length=256, concurrency=75.375)])
    (pool,) = startup.pools

    assert (pool.num_tokens, pool.max_model_len, pool.concurrency) == (19_296, 256, 75.38)


def test_a_pool_is_read_from_two_lines_of_an_earlier_release(read, write):
    (startup,) = read([write.old_size(tokens=1000), write.old_concurrency(length=100, concurrency=9.5)])
    (pool,) = startup.pools

    assert (pool.num_tokens, pool.max_model_len, pool.concurrency) == (1000, 100, 9.5)


def test_each_engine_has_a_pool(read, write):
    lines = [write.pool(tokens=10 * rank, process=f"EngineCore_DP{rank}", pid=rank) for rank in (1, 2)]
    (startup,) = read(lines)

    assert [(pool.engine, pool.num_tokens) for pool in startup.pools] == [
        ("EngineCore_DP1 pid=1", 10),
        ("EngineCore_DP2 pid=2", 20),
    ]


def test_blocks_that_were_set_by_hand_are_read(read, write):
    line = "(EngineCore pid=2) INFO [x.py:1] Overriding num_gpu_blocks=900 with num_gpu_blocks_override=100"
    (startup,) = read([line, write.pool()])

    assert startup.pools[0].num_blocks == 100


def test_each_server_is_a_start(read, write):
    startups = read([*write.gpu_log(), write.arguments(tp=2), write.engine(tp=2), write.pool()])

    assert [startup.settings.tp_size for startup in startups] == [8, 2]


def test_each_engine_of_the_same_name_is_a_start_where_nobody_says_arguments(read, write):
    assert len(read([write.engine(), write.pool(), write.engine(), write.pool()])) == 2


def test_engines_of_several_replicas_are_one_start(read, write):
    lines = [line for rank in (0, 8) for line in (write.engine(process=f"EngineCore_DP{rank}"), write.pool())]

    assert len(read(lines)) == 1


def test_a_start_that_ended_before_its_figures_is_passed_over(read, write):
    startups = read([*write.gpu_log(), write.arguments(tp=2), write.engine(tp=2)])

    assert [startup.settings.tp_size for startup in startups] == [8]


@pytest.mark.parametrize(
    "line", ["KV cache size: , tokens", "KV cache size: 9 tokens " + "9" * 5000, "GPU blocks: " + "9" * 5000]
)
def test_numbers_that_are_none_do_no_harm(line, read):
    read([line])
