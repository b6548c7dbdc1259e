import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.plan import LayerCache, fit_num_blocks, place, plan_cache
from vllm_kvpp.planner.cache_specs import StageCaches
from vllm_kvpp.planner.capacity import plan_capacity
from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.selection import QueryShape

MIB = 1024**2


def make_stage(num_layers, page=16 * 1152, num_drafts=0):
    caches = [LayerCache(f"model.layers.{number}.self_attn.attn", page) for number in range(num_layers + num_drafts)]
    return StageCaches(range(num_layers), tuple(caches), frozenset(cache.name for cache in caches[num_layers:]))


def plan_one(stage, available_bytes, **options):
    return plan_capacity([stage], [available_bytes], **{"block_size": 16, "group_size": 2, **options})


@st.composite
def cases(draw):
    group_size = draw(st.integers(2, 8))
    num_layers = draw(st.integers(group_size, 40))
    stage = make_stage(num_layers, draw(st.sampled_from([1152, 10_496, 73_728])), draw(st.integers(0, 2)))
    # Enough for some blocks of the largest stage.
    return stage, group_size, draw(st.integers(2**24, 2**34))


def plan_case(case, extra_bytes=0):
    stage, group_size, available_bytes = case
    return plan_one(stage, available_bytes + extra_bytes, group_size=group_size)


@given(case=cases())
def test_no_rank_stores_more_than_it_has(case):
    capacity = plan_case(case)
    (stage,) = capacity.stages

    for rank in stage.ranks:
        assert rank.num_blocks >= capacity.num_blocks > 0
        placement = place(stage.plan, rank.group_rank, capacity.num_blocks, stage.tail_bytes)
        assert placement.num_bytes <= stage.available_bytes


@given(case=cases())
def test_every_layer_has_one_owner(case):
    (stage,) = plan_case(case).stages

    assert [number for rank in stage.ranks for number in rank.owned_layers] == list(stage.layers)


@given(case=cases(), more=st.integers(0, 2**34))
def test_more_memory_never_holds_fewer_tokens_without_kvpp(case, more):
    assert plan_case(case, more).num_tokens_without >= plan_case(case).num_tokens_without


@given(case=cases())
def test_the_factor_stays_below_that_of_the_formula_but_for_rounding(case):
    capacity = plan_case(case)
    (stage,) = capacity.stages
    limit = stage.plan.full_bytes_per_block / max(rank.bytes_per_block.total for rank in stage.ranks)

    # Without KVPP a part of a block goes unused.
    assert capacity.num_blocks <= limit * (capacity.num_blocks_without + 1)


def test_blocks_are_those_of_the_runtimes_plan_with_its_page_for_shared_memory():
    capacity = plan_one(make_stage(8), 256 * MIB, transport="shared-memory")
    plan = plan_cache(make_stage(8).caches, group_size=2)

    assert capacity.stages[0].tail_bytes == mmap.PAGESIZE
    assert capacity.num_blocks == min(fit_num_blocks(plan, rank, 256 * MIB, mmap.PAGESIZE) for rank in (0, 1))


def test_the_blocks_are_those_that_an_engine_had_in_the_recall_model():
    # `make demo`, measured with vLLM 0.32: 8 layers, TP 2, float32, 256 MiB. It had 19,104 tokens with an exchange.
    stage = make_stage(8, page=16 * 2304)
    queries = QueryShape(4, 2, query_width=576, output_width=512, element_bytes=4)
    capacity = plan_one(stage, 256 * MIB, transport="shared-memory")
    with_exchange = plan_one(stage, 256 * MIB, transport="shared-memory", queries=queries)

    assert (capacity.num_tokens_without, capacity.num_tokens) == (14_560, 19_296)
    assert with_exchange.num_tokens == 19_104


def test_the_blocks_are_those_that_an_engine_had_with_61_layers():
    # tests/engine/test_larger_groups.py, measured with vLLM 0.32: 61 layers, TP 8, bfloat16, 256 MiB. With an exchange
    # it had 23,056 tokens.
    queries = QueryShape(8, 8, query_width=576, output_width=512, element_bytes=2)
    capacity = plan_one(make_stage(61), 256 * MIB, group_size=8, transport="shared-memory")
    with_exchange = plan_one(make_stage(61), 256 * MIB, group_size=8, transport="shared-memory", queries=queries)

    assert (capacity.num_tokens_without, capacity.num_tokens) == (3_808, 23_248)
    assert with_exchange.num_tokens == 23_056
    assert capacity.stages[0].plan.full_bytes_per_block == 1_124_352


def test_whole_layers_need_no_staging_memory():
    assert plan_one(make_stage(8), 256 * MIB).stages[0].tail_bytes == 4 * MIB
    assert plan_one(make_stage(8), 256 * MIB, transfer="full").stages[0].tail_bytes == 0


def test_the_smallest_stage_limits_all():
    stages = [make_stage(8), make_stage(40)]
    capacity = plan_capacity(stages, [256 * MIB] * 2, block_size=16, group_size=2)

    assert capacity.num_blocks == capacity.stages[1].num_blocks < capacity.stages[0].num_blocks
    assert capacity.num_blocks_without == capacity.stages[1].num_blocks_without


def test_saved_memory_is_what_the_same_tokens_do_not_take():
    capacity = plan_one(make_stage(8), 256 * MIB, transfer="full")
    blocks = capacity.num_blocks_without
    by_formula = blocks * (8 - (4 + 2)) * 16 * 1152

    # The second scratch buffer starts at a boundary of 2 MiB.
    assert by_formula - 2 * MIB <= capacity.saved_bytes <= by_formula


def test_two_layers_on_two_ranks_lose():
    capacity = plan_one(make_stage(2), 256 * MIB)

    assert capacity.factor < 1
    assert capacity.saved_bytes < 0


@pytest.mark.parametrize("available_bytes", [1, 8 * 16 * 1152 - 1, 8 * 16 * 1152])
def test_memory_too_small_for_a_block_is_refused(available_bytes):
    with pytest.raises(PlannerError, match=r"holds no block.*raise --kv-memory"):
        plan_one(make_stage(8), available_bytes)
