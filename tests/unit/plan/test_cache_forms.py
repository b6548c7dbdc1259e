import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from vllm_kvpp.plan import fit_num_blocks, place, plan_cache
from vllm_kvpp.plan.cache_forms import plain_latent, quantised_indexer, quantised_latent

BLOCK_SIZE = 64


@pytest.mark.parametrize(
    ("form", "bytes_per_token"),
    [
        (plain_latent(512, 64, 2), 1152),
        (plain_latent(512, 64, 4), 2304),
        (plain_latent(512, 64, 1), 576),
        (quantised_latent(512, 64), 656),
        (quantised_latent(512, 64, has_scales_apart=True), 656),
        (quantised_indexer(128), 132),
        (quantised_indexer(128, has_scales_apart=True), 132),
    ],
)
def test_a_token_takes_the_bytes_of_its_form(form, bytes_per_token):
    assert form.bytes_per_token == bytes_per_token
    assert sum(cache.page_size_bytes for cache in form.make_caches("x.0", BLOCK_SIZE)) == bytes_per_token * BLOCK_SIZE


@pytest.mark.parametrize(
    ("form", "spec"),
    [
        (plain_latent(512, 64, 2), {"head_size": 576, "dtype": torch.bfloat16}),
        (plain_latent(512, 64, 1), {"head_size": 576, "dtype": torch.uint8, "cache_dtype_str": "fp8"}),
        (
            quantised_latent(512, 64),
            {"head_size": 576, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656},
        ),
        (
            quantised_indexer(128),
            {"head_size": 132, "dtype": torch.uint8, "cache_role": SparseCacheRole.INDEXER},
        ),
    ],
    ids=["bf16", "fp8", "fp8_ds_mla", "indexer"],
)
def test_forms_in_one_piece_have_the_pages_of_vllms_specs(form, spec):
    (cache,) = form.make_caches("model.layers.0.attn", BLOCK_SIZE)

    assert cache.page_size_bytes == MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, **spec).page_size_bytes


def plan_sparse(*, has_scales_apart, num_layers=6, group_size=2):
    """A plan in which every second layer owns an indexer."""
    latent = quantised_latent(512, 64, has_scales_apart=has_scales_apart)
    indexer = quantised_indexer(128, has_scales_apart=has_scales_apart)
    caches = []
    for number in range(num_layers):
        caches += latent.make_caches(f"layers.{number}.attn", BLOCK_SIZE)
        caches += indexer.make_caches(f"layers.{number}.indexer", BLOCK_SIZE) if number % 2 == 0 else ()
    return plan_cache(caches, group_size=group_size)


@pytest.mark.proves("LI-C8 and SFA-C8 layouts")
def test_scales_apart_become_components_of_the_same_bundle():
    bundle = plan_sparse(has_scales_apart=True).bundles[0]

    assert [(cache.name, cache.page_size_bytes // BLOCK_SIZE) for cache in bundle.components] == [
        ("layers.0.attn", 640),
        ("layers.0.attn.scale", 16),
        ("layers.0.indexer", 128),
        ("layers.0.indexer.scale", 4),
    ]


@pytest.mark.proves("LI-C8 and SFA-C8 layouts")
def test_components_lie_one_behind_the_other_each_with_all_its_blocks():
    placed = place(plan_sparse(has_scales_apart=True), 0, num_blocks=10).bundles[0]
    ends = [component.range.end for component in placed.components]

    assert [component.range.offset for component in placed.components] == [placed.range.offset, *ends[:-1]]
    assert ends[-1] == placed.range.end
    assert [component.range.num_bytes for component in placed.components] == [
        size * BLOCK_SIZE * 10 for size in (640, 16, 128, 4)
    ]


@pytest.mark.parametrize("group_rank", [0, 1])
def test_scales_apart_cost_no_block(group_rank):
    apart, together = (plan_sparse(has_scales_apart=value) for value in (True, False))

    assert apart.bytes_per_block(group_rank) == together.bytes_per_block(group_rank)
    assert fit_num_blocks(apart, group_rank, 10**9) == fit_num_blocks(together, group_rank, 10**9)


@pytest.mark.parametrize("width", [0, 64, 200])
def test_a_width_that_is_no_whole_number_of_groups_is_refused(width):
    with pytest.raises(ValueError, match=f"{width} values are not a whole number of groups of 128"):
        quantised_indexer(width)
