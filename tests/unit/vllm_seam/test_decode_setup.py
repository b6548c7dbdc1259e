from types import SimpleNamespace

import pytest
import torch

from vllm_kvpp.config import KVPPOptions
from vllm_kvpp.errors import KVPPConfigError
from vllm_kvpp.plan import LayerCache, plan_cache
from vllm_kvpp.runtime.layer_transfers import TargetLayer
from vllm_kvpp.selection import ExchangeTraits, LinkTraits
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.vllm_seam.decode_setup import attach_decode, set_up_decode

GROUP = SimpleNamespace(size=2, rank=1, label="of ranks [2, 3]", device=torch.device("cpu"))


@pytest.fixture
def set_up(make_model):
    """Look at a stage of four layers on two ranks, with `attention` as in `make_model`."""

    def set_up(decode="auto", *, indexers=(), drafts=None, pcp=1, group=GROUP, **attention):
        modules, model = make_model(4, indexers=indexers, **attention)
        plan = plan_cache([LayerCache(name, 64) for name in modules], group_size=2)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=modules),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            parallel_config=SimpleNamespace(prefill_context_parallel_size=pcp),
            speculative_config=drafts,
        )
        runner = SimpleNamespace(get_model=lambda: model)
        return set_up_decode(plan, KVPPOptions(decode=decode), group, config, runner)

    return set_up


@pytest.mark.parametrize("decode", ["auto", "owner"])
def test_a_stage_that_can_attend_at_the_owner_is_described(set_up, decode):
    setup = set_up(decode)

    assert [(place.name, place.owner_rank) for place in setup.places.places] == [
        (f"model.layers.{number}.attn", number // 2) for number in range(4)
    ]
    assert (setup.queries.num_heads, setup.queries.group_size, setup.dtype) == (4, 2, torch.bfloat16)


def test_in_each_layer_the_indexer_comes_before_the_attention(set_up):
    setup = set_up(indexers=[0, 2])

    assert [place.name.removeprefix("model.layers.") for place in setup.places.places] == [
        "0.indexer",
        "0.attn",
        "1.attn",
        "2.indexer",
        "2.attn",
        "3.attn",
    ]
    assert setup.queries.num_choices == 3


@pytest.mark.parametrize(("drafts", "sharing"), [(None, []), ("mtp", [0, 2])])
def test_with_drafts_every_indexer_shares_what_it_chose(set_up, drafts, sharing):
    places = set_up(indexers=[0, 2], drafts=drafts).places.places

    assert [place.name for place in places if place.shares_choices] == [f"model.layers.{n}.indexer" for n in sharing]


def test_a_stage_that_is_to_move_history_is_not_looked_at(set_up):
    assert set_up("transfer", backend="OTHERS_MLA") is None


def test_a_stage_without_target_layers_has_nothing_to_attend():
    plan = plan_cache([], group_size=2)

    assert set_up_decode(plan, KVPPOptions(decode="owner"), GROUP, None, None) is None


@pytest.mark.parametrize(
    "changes",
    [{"backend": "FLASHMLA"}, {"indexers": [1]}, {"pcp": 2}],
    ids=["backend", "indexer_in_an_earlier_stage", "pcp"],
)
def test_auto_moves_history_where_attention_cannot_be_at_the_owner(set_up, changes):
    assert set_up("auto", **changes) is None


def test_owner_is_refused_naming_the_backend_its_reason_and_the_alternatives(set_up):
    with pytest.raises(KVPPConfigError) as caught:
        set_up("owner", backend="FLASHMLA")

    assert caught.value.reasons == (
        "Decode tokens cannot attend at the owner. (attention backend FLASHMLA: its tiles are scheduled for one rank's "
        "heads; set kvpp.decode to auto or transfer, or choose one of the attention backends CPU_MLA, TRITON_MLA with "
        "--attention-backend)",
    )


def test_owner_is_refused_where_sparse_attention_goes_by_an_earlier_stage(set_up):
    with pytest.raises(KVPPConfigError, match=r"goes by what an earlier stage has chosen; set kvpp\.decode to auto"):
        set_up("owner", indexers=[1])


def test_triton_on_a_device_is_refused(set_up):
    device = SimpleNamespace(**(vars(GROUP) | {"device": torch.device("cuda:1")}))

    assert set_up("owner", backend="TRITON_MLA") is not None
    with pytest.raises(KVPPConfigError, match="attention backend TRITON_MLA: its workspace"):
        set_up("owner", backend="TRITON_MLA", group=device)


class FakeExchange:
    """An exchange of one row whose output is all ones."""

    traits = ExchangeTraits(layer_bytes=3)
    max_rows = 4

    def __init__(self, areas):
        self.areas = areas

    def prepare(self, num_rows):
        """Nothing to prepare."""


def attach(setup, *, mode="owner", num_memories=2, rows=3):
    """Attach to the layers with memory for some rows."""
    num_bytes = rows * setup.queries.exchange_row_bytes
    memories = [
        SimpleNamespace(view_exchange=lambda count: torch.zeros(count, dtype=torch.uint8)) for _ in range(num_memories)
    ]
    whole = torch.zeros(8, dtype=torch.uint8)
    layers = [TargetLayer((name,), BundleMemory(0, whole, (whole.view(8, 1),))) for name in setup.places.attentions]
    group = SimpleNamespace(**vars(GROUP), make_exchange=FakeExchange)
    link = LinkTraits(call_bytes=5)
    decode = attach_decode(
        setup, KVPPOptions(decode=mode), group, layers, memories, exchange_bytes=num_bytes, link=link
    )
    return decode, link


@pytest.mark.parametrize("num_memories", [1, 2])
def test_the_exchange_is_made_of_an_area_in_each_memory(set_up, num_memories):
    decode, _ = attach(set_up(), num_memories=num_memories)

    areas = decode._exchange.areas
    assert [(area.max_rows, area.own_query.shape, area.own_query.dtype) for area in areas] == [
        (3, (3, 2, 6), torch.bfloat16)
    ] * num_memories


def test_the_choice_rests_on_the_stage_its_attentions_and_both_prices(set_up):
    setup = set_up()
    decode, link = attach(setup, mode="auto")
    costs = decode._costs

    assert decode.mode == "auto"
    assert (costs.stage.num_layers, costs.num_attentions, costs.queries) == (4, 4, setup.queries)
    assert (costs.link, costs.exchange) == (link, FakeExchange.traits)


def test_layers_are_attached_to(set_up):
    setup = set_up(indexers=[0])
    attach(setup)

    assert all("forward_mqa" in vars(attention.impl) for attention in setup.places.attentions.values())
    assert all("forward" in vars(indexer) for indexer in setup.places.indexers.values())
