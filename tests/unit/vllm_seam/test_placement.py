from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_kvpp.errors import KVPPConfigError, KVPPSeamError
from vllm_kvpp.plan import place, plan_cache
from vllm_kvpp.vllm_seam.placement import RankMemory, describe_caches, find_backing, rewrite_tensors, view_layers

NUM_BLOCKS = 7
BLOCK_SIZE = 16

MLA = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
MLA_FP8 = MLAAttentionSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_size=576,
    dtype=torch.uint8,
    cache_dtype_str="fp8_ds_mla",
    state_content_bytes=656,
)
INDEXER = MLAAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
)
FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
SLIDING = SlidingWindowMLASpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, sliding_window=128
)

DENSE = {f"model.layers.{number}.attn": MLA for number in range(6)}
SPARSE = {f"model.layers.{number}.attn": MLA_FP8 for number in range(5)} | {
    f"model.layers.{number}.indexer": INDEXER for number in (0, 3)
}
# Only the attention updates its cache by the hook; the indexer touches its own before.
MODULES = {
    name: SimpleNamespace(**({} if name.endswith("indexer") else {"prepare_kv_cache_update": None}))
    for name in DENSE | SPARSE
}
STAGES = pytest.mark.parametrize("specs", [DENSE, SPARSE], ids=["dense", "sparse"])
RANKS = pytest.mark.parametrize("group_rank", [0, 1])


def page_of(spec):
    (cache,) = describe_caches({"model.layers.0.attn": spec})
    return cache.page_size_bytes


def stock_config(specs):
    """A configuration as the engine makes it: every layer in a region of its own, one behind the other."""
    size = NUM_BLOCKS * sum(spec.page_size_bytes for spec in specs.values())
    tensors, offset = [], 0
    for name, spec in specs.items():
        num_bytes = NUM_BLOCKS * spec.page_size_bytes
        tensors.append(KVCacheTensor(size, [name], num_bytes, spec.page_size_bytes, offset))
        offset += num_bytes
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs=specs))
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group])


def place_on(specs, group_rank):
    return place(plan_cache(describe_caches(specs), group_size=2), group_rank, NUM_BLOCKS)


def allocate(config, kernel_block_size=None):
    """Let vLLM allocate, and bind the caches to modules as it does."""
    sizes = None if kernel_block_size is None else [kernel_block_size]
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC, sizes)
    return {name: SimpleNamespace(kv_cache=cache.squeeze(1)) for name, cache in caches.items()}


def bytes_of(cache):
    return cache.contiguous().view(torch.uint8).flatten()


@pytest.mark.parametrize(("spec", "bytes_per_token"), [(MLA, 1152), (MLA_FP8, 656), (INDEXER, 132)])
def test_a_page_holds_the_bytes_that_the_spec_says(spec, bytes_per_token):
    assert page_of(spec) == bytes_per_token * BLOCK_SIZE


def test_a_page_that_the_spec_pads_counts_with_its_padding():
    padded = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8, alignment=4096)

    assert page_of(padded) == 4096


def test_a_page_counts_with_the_gap_that_keeps_blocks_aligned():
    aligned = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8, block_stride_alignment=512
    )

    assert page_of(aligned) == 2560


def test_caches_keep_the_names_of_vllm():
    assert [cache.name for cache in describe_caches(SPARSE)] == list(SPARSE)


@pytest.mark.parametrize("spec", [FULL, SLIDING])
def test_a_cache_of_another_kind_is_refused_by_kind(spec):
    with pytest.raises(KVPPConfigError) as caught:
        describe_caches({**DENSE, "model.layers.6.attn": spec})

    assert caught.value.reasons == (
        "KVPP currently supports only non-hybrid MLA models. "
        f"(the model has caches of the kind {type(spec).__name__}; set enable_kvpp to false)",
    )


def test_every_foreign_kind_of_cache_is_named_once():
    with pytest.raises(KVPPConfigError, match="of the kind FullAttentionSpec, SlidingWindowMLASpec;"):
        describe_caches({"layers.0.a": SLIDING, "layers.1.a": FULL, "layers.2.a": FULL})


def test_a_draft_with_a_cache_of_another_kind_is_refused_with_the_remedy_for_drafts():
    with pytest.raises(KVPPConfigError, match=r"draft layers with MLA caches only.*FullAttentionSpec; remove --spec"):
        describe_caches({**DENSE, "draft.layers.0.attn": FULL}, frozenset({"draft.layers.0.attn"}))


def test_a_target_with_a_cache_of_another_kind_is_refused_whatever_the_draft_has():
    with pytest.raises(KVPPConfigError, match="only non-hybrid MLA models"):
        describe_caches({"layers.0.a": SLIDING, "draft.layers.0.attn": FULL}, frozenset({"draft.layers.0.attn"}))


@pytest.mark.proves("`fp8_ds_mla` caches")
@STAGES
@RANKS
def test_vllm_puts_every_cache_where_the_plan_says_in_one_buffer(specs, group_rank):
    placement = place_on(specs, group_rank)
    modules = allocate(rewrite_tensors(stock_config(specs), placement))
    backing = find_backing(placement, modules)

    assert backing.numel() == placement.num_bytes
    for placed in placement.caches:
        cache = modules[placed.cache.name].kv_cache
        assert cache.data_ptr() - backing.data_ptr() == placed.range.offset
        assert cache.numel() * cache.element_size() == placed.range.num_bytes


@pytest.mark.proves("`fp8_ds_mla` caches")
@STAGES
@RANKS
def test_writing_a_block_through_vllms_view_shows_at_the_same_block_of_ours(specs, group_rank):
    placement = place_on(specs, group_rank)
    modules = allocate(rewrite_tensors(stock_config(specs), placement))
    for layer in view_layers(RankMemory(placement, find_backing(placement, modules)), modules):
        for name, view in zip(layer.names, layer.memory.components, strict=True):
            modules[name].kv_cache[3] = 1
            assert torch.equal(view[3], bytes_of(modules[name].kv_cache[3]))
            modules[name].kv_cache.zero_()
            assert not view.any()


@STAGES
def test_a_bundle_received_as_a_whole_shows_in_every_view_of_vllm(specs):
    placement = place_on(specs, 0)
    modules = allocate(rewrite_tensors(stock_config(specs), placement))
    for layer in view_layers(RankMemory(placement, find_backing(placement, modules)), modules):
        layer.memory.whole.copy_(torch.arange(layer.memory.whole.numel()) % 251)
        shown = torch.cat([bytes_of(modules[name].kv_cache) for name in layer.names])
        assert torch.equal(shown, layer.memory.whole)


def make_memory(placement):
    return RankMemory(placement, torch.zeros(placement.num_bytes, dtype=torch.uint8))


@STAGES
@RANKS
def test_a_receiver_that_can_read_its_peers_finds_the_owners_bytes_and_an_owner_has_no_source(specs, group_rank):
    memories = [make_memory(place_on(specs, rank)) for rank in range(2)]
    layers = view_layers(memories[group_rank], MODULES, memories)
    owned = [view_layers(memories[layer.memory.owner_rank], MODULES)[n].memory for n, layer in enumerate(layers)]

    for layer, owners in zip(layers, owned, strict=True):
        is_owner = layer.memory.owner_rank == group_rank
        expected = () if is_owner else owners.components
        assert [source.data_ptr() for source in layer.memory.source] == [view.data_ptr() for view in expected]
        assert [source.shape for source in layer.memory.source] == [view.shape for view in expected]


def test_staging_memory_is_the_end_of_the_allocation():
    plan = plan_cache(describe_caches(DENSE), group_size=2)
    staged = make_memory(place(plan, 0, 4, tail_bytes=1000))

    assert staged.view_staging().numel() == 1000
    assert staged.view_staging().data_ptr() + 1000 == staged.backing.data_ptr() + staged.backing.numel()
    assert make_memory(place(plan, 0, 4)).view_staging() is None


@RANKS
def test_layers_come_in_execution_order_with_their_owners_and_all_their_caches(group_rank):
    placement = place_on(SPARSE, group_rank)
    layers = view_layers(make_memory(placement), MODULES)

    assert [(layer.names, layer.entry, layer.memory.owner_rank) for layer in layers] == [
        (("model.layers.0.attn", "model.layers.0.indexer"), "model.layers.0.indexer", 0),
        (("model.layers.1.attn",), "model.layers.1.attn", 0),
        (("model.layers.2.attn",), "model.layers.2.attn", 0),
        (("model.layers.3.attn", "model.layers.3.indexer"), "model.layers.3.indexer", 1),
        (("model.layers.4.attn",), "model.layers.4.attn", 1),
    ]


def test_layers_of_other_ranks_share_two_buffers_and_owned_ones_share_none():
    placement = place_on(DENSE, 0)
    layers = view_layers(make_memory(placement), MODULES)
    starts = [layer.memory.whole.data_ptr() for layer in layers]

    # Rank 0 owns layers 0 to 2 and receives layers 3 to 5 in buffers 1, 0, 1.
    assert len(set(starts[:3])) == 3
    assert starts[3] == starts[5] != starts[4]


def test_only_the_tensors_of_the_configuration_change():
    config = stock_config(DENSE)
    rewritten = rewrite_tensors(config, place_on(DENSE, 0))

    assert rewritten.num_blocks == config.num_blocks
    assert rewritten.kv_cache_groups is config.kv_cache_groups
    assert config.kv_cache_tensors == stock_config(DENSE).kv_cache_tensors


def test_vllm_may_still_split_blocks_for_a_kernel():
    placement = place_on(DENSE, 1)
    config = rewrite_tensors(stock_config(DENSE), placement)
    whole, split = allocate(config), allocate(config, kernel_block_size=4)

    assert all(tensor.block_stride <= tensor.layer_stride for tensor in config.kv_cache_tensors)
    assert whole["model.layers.0.attn"].kv_cache.shape == (NUM_BLOCKS, 16, 576)
    assert split["model.layers.0.attn"].kv_cache.shape == (NUM_BLOCKS * 4, 4, 576)


def test_caches_that_vllm_split_for_a_kernel_are_accepted():
    placement = place_on(DENSE, 1)
    modules = allocate(rewrite_tensors(stock_config(DENSE), placement), kernel_block_size=4)

    assert find_backing(placement, modules).numel() == placement.num_bytes


@STAGES
@RANKS
def test_the_placement_of_stock_vllm_is_refused_naming_a_cache(specs, group_rank):
    with pytest.raises(KVPPSeamError, match=r"vLLM placed model\.layers\.\d\.\w+ at bytes .* KVPP planned \["):
        find_backing(place_on(specs, group_rank), allocate(stock_config(specs)))


def test_a_cache_that_reaches_beyond_its_range_is_refused():
    placement = place_on(DENSE, 0)
    modules = allocate(rewrite_tensors(stock_config(DENSE), placement))
    first = modules["model.layers.0.attn"]
    first.kv_cache = first.kv_cache.as_strided(first.kv_cache.shape, (2 * 576 * 16, 576, 1))

    with pytest.raises(KVPPSeamError, match=r"vLLM placed model\.layers\.0\.attn"):
        find_backing(placement, modules)


def test_caches_in_several_allocations_are_refused():
    placement = place_on(DENSE, 0)
    modules = allocate(rewrite_tensors(stock_config(DENSE), placement))
    modules["model.layers.4.attn"].kv_cache = modules["model.layers.4.attn"].kv_cache.clone()

    with pytest.raises(KVPPSeamError, match="spread the KV cache over 2 allocations"):
        find_backing(placement, modules)


@STAGES
@RANKS
def test_the_pages_of_a_cache_are_found_by_its_name(specs, group_rank):
    placement = place_on(specs, group_rank)
    modules = allocate(rewrite_tensors(stock_config(specs), placement))
    memory = RankMemory(placement, find_backing(placement, modules))

    for name, module in modules.items():
        pages = memory.view_pages(name)
        assert pages.data_ptr() == module.kv_cache.data_ptr()
        assert pages.numel() == NUM_BLOCKS * page_of(specs[name])
