import json

import pytest

from vllm_kvpp.demo.capacity import ModelShape, expect_capacity, read_shape

SHAPE = ModelShape(num_layers=6, num_heads=4, latent_dim=576)


def test_the_shape_is_read_from_the_config(tmp_path):
    config = {"num_hidden_layers": 6, "num_attention_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path / "config.json") == SHAPE


def test_the_blocks_are_those_that_vllm_was_seen_to_report():
    expected = expect_capacity(SHAPE, tp_size=2, kv_cache_bytes=256 * 1024**2, block_size=16, dtype_bytes=4)
    assert (expected.num_blocks_off, expected.num_blocks_on) == (1213, 1450)


@pytest.mark.parametrize(("num_layers", "tp_size", "factor"), [(8, 2, 8 / 6), (8, 4, 2), (7, 2, 7 / 6), (61, 8, 6.1)])
def test_the_formula_counts_the_most_layers_a_rank_owns_and_two_scratch_buffers(num_layers, tp_size, factor):
    shape = ModelShape(num_layers=num_layers, num_heads=8, latent_dim=576)
    expected = expect_capacity(shape, tp_size=tp_size, kv_cache_bytes=2**30, block_size=16, dtype_bytes=2)
    assert expected.formula_factor == pytest.approx(factor)
    assert expected.num_blocks_on / expected.num_blocks_off == pytest.approx(factor, rel=0.03)
