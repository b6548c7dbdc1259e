from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_kvpp.explain.figures import find_blocks, is_derived_from_concurrency, show_tokens
from vllm_kvpp.explain.pool_lines import Pool

NUM_BLOCKS = st.integers(1, 10**6)
LENGTH = st.integers(1, 10**6)
BLOCK_SIZE = st.sampled_from((1, 16, 32, 64, 128, 256))


def print_as_vllm_0_32(num_blocks, length, block_size):
    """`get_kv_cache_capacity` and the line that says it."""
    concurrency = num_blocks / ceil(length / block_size)
    return Pool("engine", int(concurrency * length), length, float(f"{concurrency:.2f}"))


def print_as_before(num_blocks, length, block_size):
    """Tokens as blocks times block size, as earlier releases say them."""
    concurrency = num_blocks / ceil(length / block_size)
    return Pool("engine", num_blocks * block_size, length, float(f"{concurrency:.2f}"))


@given(NUM_BLOCKS, LENGTH, BLOCK_SIZE)
@example(506, 100, 1)
def test_the_blocks_are_found_again(num_blocks, length, block_size):
    pool = print_as_vllm_0_32(num_blocks, length, block_size)
    blocks = find_blocks(pool, block_size)

    assert is_derived_from_concurrency(pool)
    # Less than a token is printed as none; blocks of one token can lose one to the rounding of floats.
    assert pool.num_tokens == 0 or abs(blocks.num_blocks - num_blocks) <= (block_size == 1)


@given(NUM_BLOCKS, LENGTH, BLOCK_SIZE)
def test_the_token_figure_is_the_one_that_vllm_prints(num_blocks, length, block_size):
    pool = print_as_vllm_0_32(num_blocks, length, block_size)

    assert show_tokens(num_blocks, ceil(length / block_size), length) == pool.num_tokens


@given(NUM_BLOCKS, st.integers(17, 10**4).filter(lambda length: length % 16))
def test_the_blocks_of_an_earlier_release_are_found_or_left_open(num_blocks, length):
    blocks = find_blocks(print_as_before(num_blocks, length, 16), 16)

    assert blocks is None or abs(blocks.num_blocks - num_blocks) <= num_blocks * 16 / length


def test_an_earlier_release_is_recognised():
    assert not is_derived_from_concurrency(print_as_before(1000, 100, 16))
    assert find_blocks(print_as_before(1000, 100, 16), 16).num_blocks == 1000


def test_one_block_is_held_back():
    blocks = find_blocks(print_as_vllm_0_32(64, 1024, 64), 64)

    assert (blocks.num_blocks, blocks.per_request, blocks.num_longest_requests) == (64, 16, 3)


def test_what_a_request_wastes_is_counted():
    blocks = find_blocks(print_as_vllm_0_32(630, 1000, 16), 16)

    assert (blocks.per_request, blocks.wasted_tokens, blocks.num_tokens) == (63, 8, 10_080)


@pytest.mark.parametrize(
    "pool", [Pool("e"), Pool("e", num_tokens=5), Pool("e", max_model_len=5, concurrency=1.0), Pool("e", 5, 0, 1.0)]
)
def test_figures_that_leave_it_open_give_no_blocks(pool):
    assert find_blocks(pool, 16) is None


def test_without_a_block_size_there_are_no_blocks():
    assert find_blocks(print_as_vllm_0_32(64, 1024, 64), None) is None


def test_a_block_size_that_contradicts_the_figures_gives_no_blocks():
    # Layers of several kinds take blocks of their own: here twice as many as one kind would.
    pool = Pool("engine", 64 * 512, 1024, 32.0, num_blocks=1024)

    assert find_blocks(pool, 64) is None
