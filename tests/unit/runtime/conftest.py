import pytest
import torch

from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.selection import LinkTraits
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.transport.recording import RecordingTransport


class Stage:
    """The transfers of a stage with a recording transport; layer 1 has two caches, as with an indexer.

    `failures` says which layers' transfers fail, and how; `entry` is the cache by which layer 1 must be entered.
    """

    def __init__(self, num_layers=3, *, failures=None, entry=None):
        self.failures = failures or {}
        self._entry = entry
        self.transport = RecordingTransport()
        self.layers = tuple(self._make_layer(number) for number in range(num_layers))
        self.transfers = LayerTransfers(self.layers, self, "of ranks [2, 3]")

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

    def run_forward(self, *names):
        """Run the layers of these caches, all in order if none is named."""
        self.transfers.start_forward()
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
