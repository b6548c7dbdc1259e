import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.errors import KVPPConfigError
from vllm_kvpp.plan import LayerCache
from vllm_kvpp.plan.bundles import bundle_by_layer, split_draft_caches

MLA_PAGE = 1152 * 16
INDEXER_PAGE = 132 * 16


def mla(number):
    return LayerCache(f"model.layers.{number}.self_attn.attn", MLA_PAGE)


def indexer(number):
    return LayerCache(f"model.layers.{number}.self_attn.indexer.k_cache", INDEXER_PAGE)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.0.self_attn.attn", 0),
        ("model.layers.10.self_attn.attn", 10),
        ("language_model.model.layers.7.self_attn.indexer.k_cache", 7),
        ("model.layers.61.mtp_block.self_attn.attn", 61),
        ("model.layers.4.experts.2.attn", 4),
        ("model.layers2.5.attn", 5),
    ],
)
def test_a_layer_number_is_the_first_integer_among_the_parts_of_its_name(name, number):
    assert LayerCache(name, 16).layer_number == number


def test_a_cache_without_a_layer_number_is_refused_by_name():
    with pytest.raises(KVPPConfigError, match=r"The cache model\.encoder\.attn has no layer number in its name"):
        bundle_by_layer([LayerCache("model.encoder.attn", 16)])


@pytest.mark.parametrize("page_size_bytes", [0, -16])
def test_a_cache_without_bytes_is_a_bug_of_ours(page_size_bytes):
    with pytest.raises(AssertionError, match=r"model\.layers\.0"):
        LayerCache("model.layers.0.attn", page_size_bytes)


def test_layers_are_sorted_by_number_and_not_by_text():
    bundles = bundle_by_layer([mla(10), mla(2), mla(1)])

    assert [bundle.layer_number for bundle in bundles] == [1, 2, 10]


def test_all_caches_of_one_layer_form_one_bundle():
    (bundle,) = bundle_by_layer([indexer(3), mla(3)])

    assert bundle.components == (mla(3), indexer(3))
    assert bundle.page_size_bytes == MLA_PAGE + INDEXER_PAGE


def test_a_layer_without_an_indexer_has_a_smaller_bundle():
    with_indexer, without = bundle_by_layer([mla(0), indexer(0), mla(1)])

    assert with_indexer.page_size_bytes == without.page_size_bytes + INDEXER_PAGE


@given(st.permutations([cache(number) for number in (0, 1, 2, 9, 10, 11) for cache in (mla, indexer)]))
def test_bundles_do_not_depend_on_the_order_of_the_caches(caches):
    assert bundle_by_layer(caches) == bundle_by_layer(sorted(caches, key=lambda cache: cache.name))


def test_no_caches_make_no_bundles():
    assert bundle_by_layer([]) == ()


def test_draft_caches_are_those_that_the_drafter_loaded_whatever_their_numbers():
    targets, drafts = split_draft_caches([mla(0), mla(1), mla(2)], {mla(1).name})

    assert targets == (mla(0), mla(2))
    assert drafts == (mla(1),)


def test_without_a_drafter_every_cache_is_a_target():
    assert split_draft_caches([mla(0), mla(61)], frozenset()) == ((mla(0), mla(61)), ())


def test_draft_caches_do_not_depend_on_the_order_of_the_caches():
    names = {mla(61).name, mla(62).name}

    assert split_draft_caches([mla(62), mla(61)], names) == split_draft_caches([mla(61), mla(62)], names)


def test_a_draft_layer_that_shares_a_target_cache_is_refused_by_name():
    with pytest.raises(KVPPConfigError) as caught:
        split_draft_caches([mla(0), mla(1)], {mla(1).name, mla(62).name, mla(61).name})

    assert caught.value.reasons == (
        "KVPP does not support draft layers sharing target KV caches. "
        f"({mla(61).name}, {mla(62).name} has no cache of its own; remove --speculative-config)",
    )
