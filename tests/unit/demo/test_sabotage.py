import subprocess
import sys
from types import SimpleNamespace

import torch

from vllm_kvpp.demo.cache_meter import CacheMeterExtension
from vllm_kvpp.demo.sabotage import SabotageExtension
from vllm_kvpp.runtime.history import Step
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.selection import BlockRuns
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.transport.recording import RecordingTransport


def make_worker(transport):
    memory = BundleMemory(0, torch.zeros(4, dtype=torch.uint8), (torch.zeros(1, 4, dtype=torch.uint8),))
    worker = SabotageExtension()
    worker._kvpp = SimpleNamespace(transfers=LayerTransfers([TargetLayer(("0",), memory)], transport, "of two"))
    return worker


def run_step(worker):
    transfers = worker._kvpp.transfers
    with transfers.step(Step(BlockRuns.of([0]))):
        transfers.start_forward()
        transfers.before_layer("0")


def test_broken_transfers_move_and_count_nothing_and_keep_the_order():
    transport = RecordingTransport()
    worker = make_worker(transport)
    assert worker.demo_break_transfers() == {"transport": "NoTransport"}
    run_step(worker)
    assert transport.log == []
    assert worker._kvpp.transfers.counters.transferred_bytes == 0


def test_mended_transfers_move_again():
    transport = RecordingTransport()
    worker = make_worker(transport)
    worker.demo_break_transfers()
    assert worker.demo_mend_transfers() == {"transport": "RecordingTransport"}
    run_step(worker)
    assert [what for what, _ in transport.log] == ["start", "wait"]


def test_breaking_twice_and_mending_twice_still_ends_with_the_real_transport():
    transport = RecordingTransport()
    worker = make_worker(transport)
    for method in (worker.demo_mend_transfers, worker.demo_break_transfers, worker.demo_break_transfers):
        method()
    worker.demo_mend_transfers()
    worker.demo_mend_transfers()
    assert worker._kvpp.transfers.transport is transport


def test_the_meter_counts_an_allocation_once_however_many_tensors_share_it():
    backing, other = torch.zeros(100, dtype=torch.uint8), torch.zeros(7, dtype=torch.uint8)
    worker = CacheMeterExtension()
    worker.model_runner = SimpleNamespace(kv_caches=[backing[:50], backing[50:], other])
    assert worker.demo_cache_bytes() == {"num_bytes": 107}


def test_the_extension_adds_nothing_that_a_worker_could_have_already():
    names = {name for name in dir(SabotageExtension) if not name.startswith("__")}
    assert names == {"demo_break_transfers", "demo_mend_transfers", "demo_cache_bytes"}


def test_the_extension_imports_neither_vllm_nor_torch():
    code = "import sys, vllm_kvpp.demo.sabotage; sys.exit(bool({'vllm', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
