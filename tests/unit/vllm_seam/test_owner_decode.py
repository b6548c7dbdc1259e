import pytest
import torch

from vllm_kvpp.errors import KVPPSeamError
from vllm_kvpp.vllm_seam.owner_decode import (
    DecodePlaces,
    attach_owner_decode,
    describe_queries,
    find_attentions,
    find_places,
    find_sparse_obstacle,
)

NAMES = tuple(f"model.layers.{number}.attn" for number in range(4))
INDEXER, ATTENTION = "model.layers.0.indexer", "model.layers.0.attn"


class FakeDecode:
    """Attends all heads here where it is on, and writes down what it is asked."""

    def __init__(self, *, is_on=True, is_owner=True, reads_in_place=False):
        self.is_on = is_on
        self.is_owner = is_owner
        self.reads_in_place = reads_in_place
        self.log = []
        self.written = []

    def attend(self, name, query, attend_all):
        self.log.append((name, query))
        return attend_all(torch.cat(query, dim=-1)) if self.is_owner else "what the owner sent"

    def before_write(self, name):
        self.written.append(f"before {name}")

    def leaves_cache_as_it_is(self, name):
        self.log.append(name)
        return self.is_on and not self.is_owner

    def after_write(self, name):
        self.written.append(name)

    def before_read(self, name, num_rows):
        self.log.append((name, num_rows))

    def choose(self, name, choices, score):
        self.log.append((name, choices))
        if self.is_owner:
            score()


@pytest.fixture
def attach(make_model):
    """A layer with an indexer that goes by a fake decode: (attention, indexer)."""

    def attach(decode, views=None):
        modules, model = make_model(1, indexers=[0])
        places = DecodePlaces({ATTENTION: modules[ATTENTION]}, {INDEXER: model.indexers[0]}, ())
        attach_owner_decode(places, decode, torch.bfloat16, views or {})
        return modules[ATTENTION], model.indexers[0]

    return attach


def make_query(num_rows=2, dtype=torch.bfloat16):
    return torch.ones(num_rows, 2, 4, dtype=dtype), torch.ones(num_rows, 2, 2, dtype=dtype)


def test_while_it_is_off_the_implementation_is_called_as_it_was(attach):
    attention, _ = attach(FakeDecode(is_on=False))
    arguments = make_query(), torch.zeros(1), "metadata", attention
    _, logarithms = attention.impl.forward_mqa(*arguments)

    assert len(attention.log) == 1
    assert all(found is given for found, given in zip(attention.log[0], arguments, strict=True))
    assert logarithms == "log of sums"


def test_while_it_is_on_the_implementation_attends_what_the_owner_has_gathered(attach):
    decode = FakeDecode()
    attention, _ = attach(decode)
    query, cache = make_query(), torch.zeros(1)
    output, logarithms = attention.impl.forward_mqa(query, cache, "metadata", attention)

    ((gathered, *others),) = attention.log
    assert torch.equal(gathered, torch.cat(query, dim=-1))
    assert others == [cache, "metadata", attention]
    assert torch.equal(output, torch.ones(2, 2, 4, dtype=torch.bfloat16))
    assert logarithms is None


def test_on_another_rank_the_implementation_is_not_called(attach):
    attention, _ = attach(FakeDecode(is_owner=False))

    assert attention.impl.forward_mqa(make_query(), None, None, attention) == ("what the owner sent", None)
    assert attention.log == []


@pytest.mark.parametrize("is_tuple", [True, False])
def test_a_query_is_handed_on_in_its_parts(attach, is_tuple):
    decode = FakeDecode()
    attention, _ = attach(decode)
    query = make_query() if is_tuple else torch.ones(2, 2, 6, dtype=torch.bfloat16)
    attention.impl.forward_mqa(query, None, None, attention)

    assert decode.log == [(ATTENTION, query if is_tuple else (query,))]


@pytest.mark.parametrize("query", [torch.zeros(2, 2, 6), (make_query()[0], torch.zeros(2, 2, 2))])
def test_queries_of_another_type_than_planned_are_refused_naming_the_layer(attach, query):
    attention, _ = attach(FakeDecode())

    with pytest.raises(
        KVPPSeamError, match=r"^The decode queries of model\.layers\.0\.attn are .*planned for torch\.bf"
    ):
        attention.impl.forward_mqa(query, None, None, attention)


@pytest.mark.parametrize(("is_on", "is_owner"), [(False, False), (True, True)])
def test_a_cache_that_somebody_reads_is_updated_as_it_was(attach, is_on, is_owner):
    decode = FakeDecode(is_on=is_on, is_owner=is_owner)
    attention, _ = attach(decode)
    attention.impl.do_kv_cache_update("latents", "cache", slots="slots")

    assert attention.log == [("update", ("latents", "cache"), {"slots": "slots"})]
    assert decode.log == [ATTENTION]
    assert decode.written == [f"before {ATTENTION}", ATTENTION]


def test_a_cache_that_nobody_reads_is_left_as_it_is(attach):
    decode = FakeDecode(is_owner=False)
    attention, _ = attach(decode)
    attention.impl.do_kv_cache_update("latents", "cache", slots="slots")

    assert attention.log == []
    assert decode.written == [f"before {ATTENTION}"]


def test_a_write_is_told_when_it_is_done(attach):
    decode = FakeDecode()
    attention, _ = attach(decode)
    attention.log = attention.impl.log = decode.written
    attention.impl.do_kv_cache_update("latents")

    assert decode.written == [f"before {ATTENTION}", ("update", ("latents",), {}), ATTENTION]


def test_an_owner_attends_its_own_heads_to_its_own_cache_in_place(attach):
    decode = FakeDecode(reads_in_place=True)
    attention, _ = attach(decode)
    arguments = make_query(3), torch.zeros(1), "metadata", attention
    _, logarithms = attention.impl.forward_mqa(*arguments)

    assert decode.log == [(ATTENTION, 3)]
    assert all(found is given for found, given in zip(attention.log[0], arguments, strict=True))
    assert logarithms == "log of sums"


def test_another_rank_attends_its_own_heads_to_the_owners_cache_once_that_may_be_read(attach):
    decode = FakeDecode(is_owner=False, reads_in_place=True)

    def view(cache):
        assert decode.log == [(ATTENTION, 2)]
        return f"the owner's {cache}"

    attention, _ = attach(decode, {ATTENTION: view})
    query = make_query()
    attention.impl.forward_mqa(query, "cache", "metadata", attention)

    assert attention.log == [(query, "the owner's cache", "metadata", attention)]


def test_where_queries_travel_each_rank_keeps_to_its_own_cache(attach):
    attention, _ = attach(FakeDecode(), {ATTENTION: lambda cache: pytest.fail("asked for the owner's memory")})
    attention.impl.forward_mqa(make_query(), "cache", None, attention)

    assert attention.log[0][1] == "cache"


def test_while_it_is_off_an_indexer_is_called_as_it_was(attach):
    decode = FakeDecode(is_on=False)
    _, indexer = attach(decode)
    chosen = indexer("hidden", positions="positions")

    assert decode.log == []
    assert indexer.log == [(("hidden",), {"positions": "positions"})]
    assert chosen is indexer.topk_indices_buffer


def test_while_it_is_on_the_owner_of_an_indexer_scores(attach):
    decode = FakeDecode()
    _, indexer = attach(decode)
    chosen = indexer("hidden", positions="positions")

    assert indexer.log == [(("hidden",), {"positions": "positions"})]
    assert decode.log == [(INDEXER, indexer.topk_indices_buffer)]
    assert chosen is indexer.topk_indices_buffer


def test_on_another_rank_an_indexer_is_skipped(attach):
    _, indexer = attach(FakeDecode(is_owner=False))

    assert indexer("hidden") is indexer.topk_indices_buffer
    assert indexer.log == []


def test_only_these_layers_change(attach, attention_class, indexer_class):
    attach(FakeDecode())

    assert "forward_mqa" not in vars(attention_class().impl)
    assert "forward" not in vars(indexer_class(INDEXER))


def test_the_wrapped_calls_keep_their_names(attach):
    attention, indexer = attach(FakeDecode())

    assert (attention.impl.forward_mqa.__name__, indexer.forward.__name__) == ("forward_mqa", "forward")


def test_attentions_are_the_modules_that_attend_absorbed_queries(make_model):
    modules, _ = make_model(2, indexers=[0, 1])
    names = ["model.layers.1.attn", "model.layers.0.indexer", "model.layers.0.attn"]

    assert list(find_attentions(names, modules)) == ["model.layers.1.attn", "model.layers.0.attn"]


def find(make_model, owner_ranks, *, indexers=(), has_drafts=False):
    """The places of layers with these owners, each as (name, owner, whether it shares what it chose)."""
    modules, model = make_model(len(owner_ranks), indexers=indexers)
    owner_by_name = {}
    for number, owner_rank in enumerate(owner_ranks):
        names = [f"model.layers.{number}.indexer"] * (number in indexers) + [f"model.layers.{number}.attn"]
        owner_by_name |= dict.fromkeys(names, owner_rank)
    places = find_places(tuple(owner_by_name), owner_by_name, modules, model, has_drafts=has_drafts)
    return [
        (place.name.removeprefix("model.layers."), place.owner_rank, place.shares_choices) for place in places.places
    ]


def test_places_are_in_the_order_of_execution_with_their_owners(make_model):
    assert find(make_model, [0, 1], indexers=[1]) == [
        ("0.attn", 0, False),
        ("1.indexer", 1, False),
        ("1.attn", 1, False),
    ]


@pytest.mark.parametrize(
    ("owner_ranks", "indexers", "sharing"),
    [
        ([0, 0, 1, 1], [0, 1, 2, 3], []),
        ([0, 0, 1, 1], [0], ["0.indexer"]),
        ([0, 0, 1, 1], [0, 1], ["1.indexer"]),
        ([0, 0, 1, 1], [0, 2], []),
        ([0, 0, 1, 1], [2], []),
        ([0, 0, 0, 0], [0], []),
    ],
)
def test_choices_are_shared_where_a_layer_of_another_owner_goes_by_them(make_model, owner_ranks, indexers, sharing):
    places = find(make_model, owner_ranks, indexers=indexers)

    assert [name for name, _, shares in places if shares] == sharing


def test_with_drafts_every_indexer_shares_what_it_chose(make_model):
    places = find(make_model, [0, 1], indexers=[0, 1], has_drafts=True)

    assert [(name, shares) for name, _, shares in places] == [
        ("0.indexer", True),
        ("0.attn", False),
        ("1.indexer", True),
        ("1.attn", False),
    ]


def test_indexers_of_layers_that_are_no_target_have_no_place(make_model):
    modules, model = make_model(2, indexers=[0, 1])
    owner_by_name = {INDEXER: 0, ATTENTION: 0}
    places = find_places(tuple(owner_by_name), owner_by_name, modules, model, has_drafts=False)

    assert [place.name for place in places.places] == [INDEXER, ATTENTION]
    assert list(places.indexers) == [INDEXER]


def places_of(make_model, *, indexers=(), **changes):
    modules, model = make_model(4, indexers=indexers, **changes)
    names = [name for name in (*NAMES, *modules) if name in modules]
    ordered = tuple(sorted(dict.fromkeys(names), key=lambda name: (name.split(".")[2], name.endswith("attn"))))
    return ordered, find_places(ordered, dict.fromkeys(ordered, 0), modules, model, has_drafts=False)


def test_dense_attention_has_no_obstacle_of_sparse_attention(make_model):
    assert find_sparse_obstacle(*places_of(make_model)) is None


def test_sparse_attention_that_begins_with_an_indexer_has_no_obstacle(make_model):
    assert find_sparse_obstacle(*places_of(make_model, indexers=[0, 2])) is None


def test_sparse_attention_that_goes_by_an_earlier_stage_cannot_attend_at_the_owner(make_model):
    obstacle = find_sparse_obstacle(*places_of(make_model, indexers=[1]))

    assert obstacle == "the first layer of this pipeline stage goes by what an earlier stage has chosen"


def test_choices_of_another_type_cannot_be_shared(make_model):
    obstacle = find_sparse_obstacle(*places_of(make_model, indexers=[0], dtype=torch.int64))

    assert obstacle == "its indexers choose in {torch.int64}"


@pytest.mark.parametrize(("indexers", "num_choices"), [((), 0), ((0,), 3)])
def test_queries_are_described_with_the_heads_of_all_ranks(make_model, indexers, num_choices):
    shape = describe_queries(places_of(make_model, indexers=indexers)[1], 3, torch.bfloat16)

    assert (shape.num_heads, shape.group_size, shape.heads_per_rank) == (6, 3, 2)
    assert (shape.query_width, shape.output_width, shape.element_bytes) == (6, 4, 2)
    assert shape.num_choices == num_choices
