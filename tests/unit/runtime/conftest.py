import pytest
import torch

from vllm_kvpp.plan.decode_place import DecodeCosts
from vllm_kvpp.plan.transfer_way import StageShape
from vllm_kvpp.runtime.decode_places import OwnedPlace
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.runtime.owner_decode import OwnerDecode, OwnerLinks
from vllm_kvpp.selection import ExchangeTraits, LinkTraits, QueryShape
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.transport.recording import RecordingTransport


class Stage:
    """The transfers of a stage with a recording transport; layer 1 has two caches, as with an indexer.

    `failures` says which layers' transfers fail, and how; `entry` is the cache by which layer 1 must be entered.
    `decode` attends decode rows at the owners.
    """

    def __init__(self, num_layers=3, *, failures=None, entry=None, decode=None):
        self.failures = failures or {}
        self._entry = entry
        self.transport = RecordingTransport()
        self.layers = tuple(self._make_layer(number) for number in range(num_layers))
        self.transfers = LayerTransfers(self.layers, self, "of ranks [2, 3]", decode=decode)

    def _make_layer(self, number):
        names = (f"layers.{number}.attn", *((f"layers.{number}.indexer",) if number == 1 else ()))
        whole = torch.zeros(8 * (number + 1), dtype=torch.uint8)
        memory = BundleMemory(number % 2, whole, (whole.view(2, -1),))
        return TargetLayer(names, memory, entry=self._entry if number == 1 else None)

    def _number(self, memory):
        return next(number for number, layer in enumerate(self.layers) if layer.memory is memory)

    @property
    def traits(self):
        """Be the transport of the transfers: calls and staging cost nothing."""
        return LinkTraits(call_bytes=0)

    def prepare(self, selection):
        """Be the transport of the transfers."""
        self.transport.prepare(selection)

    def start(self, memory):
        """Be the transport of the transfers."""
        self.transport.failure = self.failures.get(self._number(memory))
        return self.transport.start(memory)

    @property
    def calls(self):
        """What the transport was asked, as "start 0", "wait 0", …"""
        return [f"{call} {self._number(memory)}" for call, memory in self.transport.log]

    def run_forward(self, *names, rows=None):
        """Run the layers of these caches, all in order if none is named."""
        self.transfers.start_forward(rows)
        for name in names or [name for layer in self.layers for name in layer.names]:
            self.transfers.before_layer(name)

    def run_step(self, step, *names, error=None):
        """Run one forward inside `step`, which ends with `error` if there is one."""
        with self.transfers.step(step):
            self.run_forward(*names)
            if error is not None:
                raise error


@pytest.fixture
def make_stage():
    return Stage


class FakeExchange:
    """An exchange that writes down what it is asked; `failures` says which calls fail, and how.

    `gathered` is what an owner gets. Every rank's output is that of its own heads, or `scattered`.
    """

    traits = ExchangeTraits(layer_bytes=0)

    def __init__(self, rank, shape, *, max_rows=8):
        self.rank = rank
        self.shape = shape
        self.max_rows = max_rows
        self.log = []
        self.failures = {}
        self.num_rows = 0

    def prepare(self, num_rows):
        self.num_rows = num_rows
        self._note(f"prepare {num_rows}")

    def begin_gather(self):
        self._note("begin_gather")

    def gather(self, owner_rank, query):
        self._note(f"gather {owner_rank}")
        self.query = query
        own = torch.cat(query, dim=-1)
        return torch.cat([own] * self.shape.group_size, dim=1) if owner_rank == self.rank else None

    def scatter(self, owner_rank, output):
        self._note(f"scatter {owner_rank}")
        self.output = output
        return torch.full((self.num_rows, self.shape.heads_per_rank, self.shape.output_width), 7.0)

    def share(self, owner_rank, choices):
        self._note(f"share {owner_rank}")
        if owner_rank != self.rank:
            choices.fill_(owner_rank + 1)

    def _note(self, call):
        self.log.append(call)
        if call.split()[0] in self.failures:
            raise self.failures[call.split()[0]]


ATTENTION_PLACES = tuple(OwnedPlace(f"layers.{number}.attn", number % 2) for number in range(3))


@pytest.fixture
def make_decode():
    """One rank's decode at the owners, of six heads in a group of three; and its exchange. It can read by `reads`."""

    def make_decode(
        places=ATTENTION_PLACES,
        *,
        rank=0,
        mode="owner",
        num_choices=0,
        traits=FakeExchange.traits,
        warn=None,
        reads=None,
        **exchange_changes,
    ):
        shape = QueryShape(6, 3, query_width=5, output_width=4, element_bytes=2, num_choices=num_choices)
        exchange = FakeExchange(rank, shape, **exchange_changes)
        stage = StageShape(num_blocks=100, num_layers=3, num_components=3, page_size_bytes=3_000)
        costs = DecodeCosts(stage, num_attentions=3, queries=shape, link=LinkTraits(call_bytes=0), exchange=traits)
        label = "of ranks [2, 3, 4]"
        links = OwnerLinks(exchange, reads)
        decode = OwnerDecode(places, links, costs, group_rank=rank, group_label=label, mode=mode, warn=warn)
        return decode, exchange

    return make_decode
