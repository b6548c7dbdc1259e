from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mla_cpu_reference.sparse_indexer import indexer_forward, quantise, write_keys
from sparse_batches import (
    NAME,
    TOPK,
    PagedRun,
    Part,
    RandomSequence,
    make_indexer,
    plain_attention,
    plain_choice,
)
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

# Shorter than the choice, longer by less than a block, and over several blocks.
LENGTHS = (7, 21, 70)
STEPS: dict[str, list[list[Part]]] = {
    "one request a step": [[(0, 0, 7)], [(1, 0, 21)], [(2, 0, 70)]],
    "all in one batch": [[(0, 0, 7), (1, 0, 21), (2, 0, 70)]],
    "chunks that end inside blocks, beside others' first tokens": [
        [(2, 0, 19), (0, 0, 3)],
        [(2, 19, 50), (1, 0, 16), (0, 3, 7)],
        [(1, 16, 21), (2, 50, 70)],
    ],
    "decoding, one token a step": [
        [(1, 0, 12), (2, 0, 61)],
        *[[(1, 12 + number, 13 + number), (2, 61 + number, 62 + number)] for number in range(9)],
        [(0, 0, 7)],
    ],
}


@pytest.fixture(autouse=True)
def reference_indexer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparseAttnIndexer, "forward_cpu", indexer_forward)


def random_sequences() -> list[RandomSequence]:
    return [RandomSequence(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("steps", STEPS.values(), ids=list(STEPS))
def test_every_token_chooses_and_attends_as_a_loop_over_its_own_sequence_does(steps: list[list[Part]]) -> None:
    sequences = random_sequences()
    run = PagedRun(sequences)
    for parts in steps:
        choices, outputs = run.step(parts)
        tokens = [(sequences[request], position) for request, *span in parts for position in range(*span)]
        for (sequence, position), choice, output in zip(tokens, choices.tolist(), outputs, strict=True):
            expected = plain_choice(sequence, position)
            assert choice == expected + [-1] * (TOPK - len(expected))
            torch.testing.assert_close(
                output.double(), plain_attention(sequence, position, expected), atol=1e-5, rtol=0
            )


def test_of_equal_scores_the_earlier_token_is_chosen() -> None:
    (sequence,) = (RandomSequence(50, 0),)
    # The first head's product is negative for all keys but the last, where no head is left: exactly 0.
    sequence.index_weights[:, 1] = 0
    sequence.index_query[:, 0] = torch.ones(128).to(torch.float8_e4m3fn)
    sequence.index_weights[:, 0] = 1
    sequence.index_keys = -sequence.index_keys.abs()
    sequence.index_keys[40] = 1
    choices, _ = PagedRun([sequence]).step([(0, 0, 50)])
    assert choices[30].tolist() == list(range(TOPK))
    assert choices[45].tolist() == [40, *range(TOPK - 1)]


def test_a_later_chunk_reads_the_keys_that_an_earlier_one_has_written() -> None:
    run = PagedRun([RandomSequence(50, 0)])
    run.step([(0, 0, 30)])
    run.index_cache.zero_()
    choices, _ = run.step([(0, 30, 50)])
    assert choices[0].tolist() != plain_choice(run.sequences[0], 30)


def test_padding_writes_nothing_and_gets_zeros() -> None:
    plain, padded = (PagedRun([RandomSequence(20, 0)]) for _ in range(2))
    expected, expected_output = plain.step([(0, 0, 20)])
    choices, output = padded.step([(0, 0, 20)], padding=4)
    assert torch.equal(choices[:20], expected)
    assert (choices[20:] == -1).all()
    assert torch.equal(output, torch.cat((expected_output, torch.zeros_like(output[:4]))))
    assert torch.equal(padded.index_cache, plain.index_cache)


def test_a_token_without_a_slot_is_not_written() -> None:
    cache = torch.zeros(2, 16, 132, dtype=torch.uint8)
    write_keys(cache, torch.ones(2, 128), torch.tensor([-1, 18]), 128)
    assert cache.any(dim=-1).nonzero().tolist() == [[1, 2]]


def test_a_token_without_a_choice_gets_zeros_and_no_nan() -> None:
    run = PagedRun([RandomSequence(20, 0)])
    run.step([(0, 0, 20)])
    run.buffer.fill_(-1)
    output, _ = run.attention.forward_mqa(run.sequences[0].query, run.cache, run.metadata([(0, 0, 20)]), None)
    assert torch.equal(output, torch.zeros_like(output))


def test_a_layer_without_an_indexer_attends_to_the_last_choice() -> None:
    sequence = RandomSequence(40, 0)
    owner = PagedRun([sequence])
    sharer = PagedRun([RandomSequence(40, 1)], owner.buffer)
    choices, _ = owner.step([(0, 0, 40)])
    sharer.cache.copy_(owner.cache)
    query = sharer.sequences[0].query
    output, _ = sharer.attention.forward_mqa(query, sharer.cache, sharer.metadata([(0, 0, 40)]), SimpleNamespace())
    sequence.query = query
    for position in (3, 39):
        chosen = [token for token in choices[position].tolist() if token >= 0]
        expected = plain_attention(sequence, position, chosen)
        torch.testing.assert_close(output[position].double(), expected, atol=1e-5, rtol=0)


def test_hooks_of_the_indexer_module_run_before_its_cache_is_touched() -> None:
    run = PagedRun([RandomSequence(20, 0)])
    seen: list[bool] = []
    run.indexer.register_forward_pre_hook(lambda module, arguments: seen.append(bool(run.index_cache.any())))
    run.step([(0, 0, 20)])
    assert seen == [False]
    assert run.index_cache.any()


def test_a_profile_run_leaves_the_choice_alone() -> None:
    run = PagedRun([RandomSequence(5, 0)])
    sequence = run.sequences[0]
    with override_forward_context(SimpleNamespace(attn_metadata=None)):
        buffer = run.indexer(sequence.latents, sequence.index_query, sequence.index_keys, sequence.index_weights)
    assert (buffer == -7).all()


@pytest.mark.parametrize(
    "changes", [{"use_fp4_cache": True}, {"skip_k_cache_insert": True}, {"compress_ratio": 4}], ids=str
)
def test_what_the_indexer_lacks_is_refused_by_name(changes: dict[str, Any]) -> None:
    indexer = make_indexer(torch.zeros(1), torch.zeros(1), **changes)
    with (
        override_forward_context(SimpleNamespace(attn_metadata={NAME: None})),
        pytest.raises(NotImplementedError, match=f"lacks {next(iter(changes))};"),
    ):
        indexer(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1))


def test_quantised_values_use_the_range_of_float8_with_scales_that_are_powers_of_two() -> None:
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None]
    values, scales = quantise(x, 128)
    assert torch.equal(scales.log2(), scales.log2().round())
    largest = values.float().unflatten(-1, (2, 128)).abs().amax(dim=-1)
    assert (largest > 223).all()
    restored = (values.float().unflatten(-1, (2, 128)) * scales[..., None]).flatten(-2)
    # Half a step of a three-bit mantissa, and of the smallest subnormal.
    error_bound = x.abs() / 16 + scales.repeat_interleave(128, dim=-1) * 2.0**-10
    assert ((restored - x).abs() <= error_bound).all()
