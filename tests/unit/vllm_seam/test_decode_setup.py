from types import SimpleNamespace

import pytest
import torch

from vllm_kvpp.config import KVPPOptions
from vllm_kvpp.errors import KVPPConfigError
from vllm_kvpp.plan import LayerCache, plan_cache
from vllm_kvpp.runtime.layer_transfers import TargetLayer
from vllm_kvpp.selection import ExchangeTraits, LinkTraits
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.vllm_seam import decode_setup
from vllm_kvpp.vllm_seam.decode_setup import attach_decode, set_up_decode

GROUP = SimpleNamespace(size=2, rank=1, label="of ranks [2, 3]", device=torch.device("cpu"), shares_memory=False)
SHARING_GROUP = SimpleNamespace(**(vars(GROUP) | {"shares_memory": True}))
PAGES = 64


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
    assert (setup.attends_at_owner, setup.reads_in_place) == (True, False)


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


@pytest.mark.parametrize("decode", ["auto", "in_place"])
def test_a_stage_of_ranks_that_share_memory_reads_in_place_and_keeps_no_memory_for_queries(set_up, decode):
    setup = set_up(decode, group=SHARING_GROUP)

    assert setup.reads_in_place
    assert setup.find_mode(decode) == "in_place"
    assert not setup.exchanges_queries(decode)


def test_a_stage_that_could_read_in_place_attends_at_the_owner_if_asked(set_up):
    setup = set_up("owner", group=SHARING_GROUP)

    assert setup.find_mode("owner") == "owner"
    assert setup.exchanges_queries("owner")


def test_auto_attends_at_the_owner_or_moves_history_where_memory_is_not_shared(set_up):
    setup = set_up("auto")

    assert setup.find_mode("auto") == "auto"
    assert setup.exchanges_queries("auto")


def test_different_heads_stand_in_the_way_of_the_exchange_alone(set_up, make_model, monkeypatch):
    monkeypatch.setattr(decode_setup, "find_obstacle", lambda *args, **kwargs: "its layers have different heads")
    setup = set_up("auto", group=SHARING_GROUP)

    assert (setup.attends_at_owner, setup.reads_in_place) == (False, True)
    assert not setup.exchanges_queries("owner")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "the ranks do not share memory"),
        ({"group": SHARING_GROUP, "backend": "FLASHMLA"}, "attention backend FLASHMLA: nobody has run it on another"),
        ({"group": SHARING_GROUP, "indexers": [0]}, "its indexers choose at the owner, and other ranks do not know"),
        ({"group": SHARING_GROUP, "pcp": 2}, "ranks of prefill context parallelism have different tokens"),
    ],
    ids=["memory", "backend", "indexers", "pcp"],
)
def test_in_place_is_refused_with_the_reason_and_the_alternatives(set_up, changes, reason):
    with pytest.raises(KVPPConfigError) as caught:
        set_up("in_place", **changes)

    (found,) = caught.value.reasons
    assert found.startswith(f"Decode tokens cannot read the owner's memory in place. ({reason}")
    assert found.endswith("set kvpp.decode to auto, owner or transfer)")


@pytest.mark.parametrize("changes", [{"backend": "TRITON_MLA"}, {"indexers": [0]}], ids=["backend", "indexers"])
def test_auto_attends_at_the_owner_what_cannot_be_read_in_place(set_up, changes):
    setup = set_up("auto", group=SHARING_GROUP, **changes)

    assert (setup.attends_at_owner, setup.reads_in_place) == (True, False)


class FakeExchange:
    """An exchange of one row whose output is all ones."""

    traits = ExchangeTraits(layer_bytes=3)
    max_rows = 4

    def __init__(self, areas):
        self.areas = areas

    def prepare(self, num_rows):
        """Nothing to prepare."""


class FakeMemory:
    """One rank's memory, of which every byte of a cache is the rank's number."""

    def __init__(self, rank):
        self.rank = rank
        self.pages = {}

    def view_exchange(self, num_bytes):
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def view_pages(self, name):
        return self.pages.setdefault(name, torch.full((PAGES,), self.rank, dtype=torch.uint8))


def attach(setup, *, mode="owner", num_memories=2, rows=3):
    """Attach to the layers with memory for some rows."""
    num_bytes = rows * setup.queries.exchange_row_bytes
    memories = list(map(FakeMemory, range(num_memories)))
    whole = torch.zeros(8, dtype=torch.uint8)
    layers = [TargetLayer((name,), BundleMemory(0, whole, (whole.view(8, 1),))) for name in setup.places.attentions]
    group = SimpleNamespace(**vars(GROUP), make_exchange=FakeExchange, make_reads=lambda: "reads")
    link = LinkTraits(call_bytes=5)
    decode = attach_decode(
        setup, KVPPOptions(decode=mode), group, layers, memories, exchange_bytes=num_bytes, link=link
    )
    return decode, link, memories


@pytest.mark.parametrize("num_memories", [1, 2])
def test_the_exchange_is_made_of_an_area_in_each_memory(set_up, num_memories):
    decode, *_ = attach(set_up(), num_memories=num_memories)

    areas = decode._exchange.areas
    assert [(area.max_rows, area.own_query.shape, area.own_query.dtype) for area in areas] == [
        (3, (3, 2, 6), torch.bfloat16)
    ] * num_memories


def test_the_choice_rests_on_the_stage_its_attentions_and_both_prices(set_up):
    setup = set_up()
    decode, link, _ = attach(setup, mode="auto")
    costs = decode._costs

    assert decode.mode == "auto"
    assert (costs.stage.num_layers, costs.num_attentions, costs.queries) == (4, 4, setup.queries)
    assert (costs.link, costs.exchange) == (link, FakeExchange.traits)


def test_layers_are_attached_to(set_up):
    setup = set_up(indexers=[0])
    attach(setup)

    assert all("forward_mqa" in vars(attention.impl) for attention in setup.places.attentions.values())
    assert all("forward" in vars(indexer) for indexer in setup.places.indexers.values())


@pytest.mark.parametrize(("group", "reads"), [(GROUP, None), (SHARING_GROUP, "reads")], ids=["apart", "sharing"])
def test_messages_of_readers_are_made_where_memory_is_shared(set_up, group, reads):
    decode, *_ = attach(set_up(group=group))

    assert decode._links.reads == reads


def test_without_memory_for_queries_there_is_no_exchange_and_no_price_of_one(set_up):
    decode, *_ = attach(set_up(group=SHARING_GROUP), mode="auto", rows=0)

    assert decode._links.exchange is None
    assert decode._costs.exchange is None


@pytest.mark.parametrize(("number", "seen"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_in_place_each_layer_attends_to_its_owners_memory(set_up, monkeypatch, number, seen):
    setup = set_up(group=SHARING_GROUP)
    decode, _, memories = attach(setup, mode="in_place", rows=0)
    name = f"model.layers.{number}.attn"
    attention = setup.places.attentions[name]
    monkeypatch.setattr(type(decode), "is_on", True)
    monkeypatch.setattr(type(decode), "reads_in_place", True)
    monkeypatch.setattr(decode, "before_read", lambda name, num_rows: None)
    query = torch.zeros(1, 2, 6, dtype=torch.bfloat16)
    attention.impl.forward_mqa(query, memories[1].view_pages(name).view(4, -1), None, attention)

    assert torch.equal(attention.log[0][1], torch.full((4, PAGES // 4), seen, dtype=torch.uint8))
