import pytest

from vllm_kvpp.explain.kvpp_lines import read_kvpp_start
from vllm_kvpp.explain.log_file import parse_line
from vllm_kvpp.plan import LayerCache, place, plan_cache
from vllm_kvpp.plan.summary import CacheSummary


@pytest.fixture
def summary():
    """Of a rank that is like one of a real server."""

    def make(num_layers=8, num_blocks=1206):
        plan = plan_cache([LayerCache(f"layers.{number}.attn", 36_864) for number in range(num_layers)], group_size=2)
        return CacheSummary(
            plan=plan, placement=place(plan, 0, num_blocks, 0), group_rank=0, block_size=16, available_bytes=2**28
        )

    return make


def read(lines):
    return read_kvpp_start([parse_line(line) for line in lines])


def prefix(lines, name="Worker_TP0 pid=3"):
    return [f"({name}) INFO 11-30 12:36:20 [session.py:170] {line}" for line in lines]


def test_what_the_summary_writes_is_read_back(summary):
    made = summary()
    (rank,) = read(prefix(made.as_lines())).ranks

    assert (rank.group_rank, rank.group_size) == (0, 2)
    assert (rank.num_blocks, rank.block_size) == (made.placement.num_blocks, made.block_size)
    assert (rank.num_tokens, rank.num_tokens_without) == (made.num_tokens, made.num_tokens_without)


def test_blocks_of_two_stages_that_alternate_are_kept_apart(summary):
    first, second = prefix(summary().as_lines(), "A pid=1"), prefix(summary(4, 700).as_lines(), "B pid=2")
    ranks = read([line for pair in zip(first, second, strict=True) for line in pair]).ranks

    assert [rank.num_blocks for rank in ranks] == [1206, 700]


def test_a_record_that_names_its_process_once_is_read(summary):
    first, *rest = summary().as_lines()
    (rank,) = read([*prefix([first]), *rest]).ranks

    assert rank.num_blocks == 1206


def test_the_stage_that_would_hold_the_fewest_tokens_decides_what_was_gained(summary):
    start = read(prefix(summary().as_lines(), "A pid=1") + prefix(summary(4).as_lines(), "B pid=2"))

    assert start.fewest.num_tokens_without == summary().num_tokens_without < summary(4).num_tokens_without


def test_the_group_size_is_read():
    start = read(["(APIServer pid=1) INFO [platform_hook.py:82] KVPP is on: group size 4."])

    assert (start.is_on, start.group_size) == (True, 4)


def test_a_switch_without_effect_is_read():
    start = read(["(APIServer pid=1) WARNING [platform_hook.py:64] enable_kvpp has no effect: the KVPP group has 1"])

    assert (start.is_on, start.has_no_effect) == (False, True)


def test_a_log_without_kvpp_has_none():
    start = read(["INFO hello"])

    assert (start.is_on, start.has_no_effect, start.fewest) == (False, False, None)


def test_a_block_that_breaks_off_is_no_crash(summary):
    (rank,) = read(prefix(summary().as_lines()[:2])).ranks

    assert rank.num_tokens is None
