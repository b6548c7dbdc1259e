import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.selection import BlockRuns
from vllm_kvpp.transport.block_copies import copy_blocks, stage_blocks

NUM_BLOCKS = 12
sets = st.sets(st.integers(0, NUM_BLOCKS - 1))


@given(sets, st.randoms(use_true_random=False))
def test_each_block_arrives_at_its_counterpart_and_no_other_is_touched(ids, generator):
    others = sorted(generator.sample(range(NUM_BLOCKS), len(ids)))
    source, target = (
        torch.arange(NUM_BLOCKS * 3, dtype=torch.uint8).view(NUM_BLOCKS, 3),
        torch.full((NUM_BLOCKS, 3), 99),
    )
    target = target.to(torch.uint8)
    copy_blocks(source, BlockRuns.of(ids), target, BlockRuns.of(others))

    expected = torch.full((NUM_BLOCKS, 3), 99, dtype=torch.uint8)
    expected[others] = source[sorted(ids)]
    assert torch.equal(target, expected)


def test_sets_of_different_sizes_are_a_bug_of_ours():
    pages = torch.zeros(4, 2, dtype=torch.uint8)

    with pytest.raises(AssertionError, match="2 blocks onto 1"):
        copy_blocks(pages, BlockRuns.of([0, 1]), pages, BlockRuns.of([3]))


def test_staged_components_follow_each_other_without_gaps(make_memory):
    staging = torch.zeros(100, dtype=torch.uint8)
    areas, num_bytes = stage_blocks(staging, make_memory(pages=(6, 2)).components, 3)

    assert num_bytes == 3 * (6 + 2)
    assert [area.shape for area in areas] == [(3, 6), (3, 2)]
    assert [area.data_ptr() - staging.data_ptr() for area in areas] == [0, 18]
