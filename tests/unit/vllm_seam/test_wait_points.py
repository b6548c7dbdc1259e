from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

from vllm_kvpp.errors import KVPPSeamError
from vllm_kvpp.vllm_seam.wait_points import attach_waits, find_indexers, in_order_of_access

ATTENTION, INDEXER = "layers.0.attn", "layers.0.indexer.k_cache"


class Indexer(SparseAttnIndexer):
    """vLLM's indexer, without what its constructor needs an engine for."""

    def __init__(self, log, *, cache_name=INDEXER, skip_k_cache_insert=False):
        torch.nn.Module.__init__(self)
        self.k_cache = SimpleNamespace(prefix=cache_name)
        self.skip_k_cache_insert = skip_k_cache_insert
        self._log = log

    def forward(self, hidden_states):
        self._log.append("score")


class Attention(MLAAttention):
    """vLLM's layer, reduced to what touches the cache, in its own forward if `fused`."""

    def __init__(self, log):
        torch.nn.Module.__init__(self)
        self._log = log

    def prepare_kv_cache_update(self, attn_metadata):
        self._log.append("update")


class FusedAttention(Attention):
    def forward(self, hidden_states):
        self._log.append("project, score and update")


class PlainAttention:
    """A layer with the hook, which is not a module."""

    def __init__(self, log):
        self._log = log

    def prepare_kv_cache_update(self, attn_metadata):
        self._log.append("update")


class Layer:
    """One layer of a model with its modules by cache name, and what happened in it."""

    def __init__(self, attention=Attention, *, cache_names=(ATTENTION, INDEXER), **indexer):
        self.log = []
        self.attention = attention(self.log)
        self.model = torch.nn.Module()
        self.model.indexer = Indexer(self.log, **indexer)
        modules = {ATTENTION: self.attention, INDEXER: self.model.indexer.k_cache}
        self.modules = {name: modules[name] for name in cache_names}

    def attach(self):
        attach_waits(tuple(self.modules), self.modules, self.model, lambda name: self.log.append(f"wait {name}"))


def test_a_layer_without_an_indexer_waits_before_its_cache_update():
    layer = Layer(PlainAttention, cache_names=[ATTENTION])
    layer.attach()
    layer.attention.prepare_kv_cache_update(None)

    assert layer.log == [f"wait {ATTENTION}", "update"]


def test_each_of_two_attentions_of_a_layer_waits_before_its_cache_update():
    log = []
    modules = {f"layers.0.self_attn.{index}.attn": PlainAttention(log) for index in range(2)}
    attach_waits(tuple(modules), modules, torch.nn.Module(), lambda name: log.append(f"wait {name}"))
    for module in modules.values():
        module.prepare_kv_cache_update(None)

    assert log == ["wait layers.0.self_attn.0.attn", "update", "wait layers.0.self_attn.1.attn", "update"]


def test_an_indexer_waits_before_it_scores():
    layer = Layer()
    layer.attach()
    layer.model.indexer(torch.zeros(1))
    layer.attention.prepare_kv_cache_update(None)

    assert layer.log == [f"wait {INDEXER}", "score", f"wait {ATTENTION}", "update"]


def test_a_layer_with_a_forward_of_its_own_waits_for_all_its_caches_before_it():
    layer = Layer(FusedAttention, skip_k_cache_insert=True)
    layer.attach()
    layer.attention(torch.zeros(1))

    assert layer.log == [f"wait {INDEXER}", f"wait {ATTENTION}", "project, score and update"]


@pytest.mark.parametrize(
    "indexer", [{"skip_k_cache_insert": True}, {"cache_name": "layers.9.indexer.k_cache"}], ids=["written", "missing"]
)
def test_an_indexer_cache_that_no_indexer_reads_and_writes_by_itself_is_refused_by_name(indexer):
    with pytest.raises(KVPPSeamError, match=r"no place to wait before layers\.0\.indexer\.k_cache: no indexer"):
        Layer(**indexer).attach()


def test_a_layer_whose_attention_has_no_hook_is_refused_by_name():
    with pytest.raises(KVPPSeamError, match=r"no place to wait before layers\.0\.indexer\.k_cache: SimpleNamespace"):
        Layer(cache_names=[INDEXER]).attach()


def test_the_indexers_cache_comes_first_whatever_the_names_are():
    attention, cache = SimpleNamespace(prepare_kv_cache_update=None), SimpleNamespace()

    assert in_order_of_access(("a", "b"), {"a": attention, "b": cache}) == ("b", "a")
    assert in_order_of_access(("a", "b"), {"a": cache, "b": attention}) == ("a", "b")


def test_indexers_are_found_wherever_the_model_keeps_them():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Indexer([], cache_name=f"layers.{number}.k") for number in range(2)])

    assert sorted(find_indexers(model)) == ["layers.0.k", "layers.1.k"]


def test_no_wait_is_attached_to_vllms_classes():
    Layer().attach()

    assert "prepare_kv_cache_update" in vars(Attention)
    assert Attention.prepare_kv_cache_update.__qualname__ == "Attention.prepare_kv_cache_update"
    assert MLAAttention.prepare_kv_cache_update.__module__ == MLAAttention.__module__
