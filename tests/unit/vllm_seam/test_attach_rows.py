"""When and of whom a forward asks which rows of its batch decode."""

from types import SimpleNamespace

import pytest
import torch
from vllm.forward_context import override_forward_context

from vllm_kvpp.runtime.history import BlockTables, DecodeRows, Step
from vllm_kvpp.runtime.layer_transfers import LayerTransfers, TargetLayer
from vllm_kvpp.selection import BlockRuns
from vllm_kvpp.transport.base import BundleMemory
from vllm_kvpp.transport.recording import RecordingTransport
from vllm_kvpp.vllm_seam.attach import attach

NAME = "layers.0.attn"
WITH_HISTORY = Step(BlockRuns.of([1]))


class FakeDecode:
    """Attends nothing at the owner, and writes down of which rows it hears."""

    def __init__(self):
        self.rows = []

    def begin(self, step, rows, transfer, counters):
        self.rows.append(rows)

    def before_step(self):
        """Nobody reads."""

    def check_all_attended(self):
        """Nothing was to attend."""

    def reset(self):
        """Nothing to reset."""


class FakeRunner:
    """A runner of a model with one layer, run by hand."""

    def __init__(self):
        self.model = torch.nn.Identity()

    def get_model(self):
        return self.model

    def execute_model(self, scheduler_output):
        """Nothing to execute."""


@pytest.fixture
def attached(attention_class):
    """A model with one layer, its transfers, and a decode that hears of rows."""
    runner, decode, layer = FakeRunner(), FakeDecode(), attention_class()
    whole = torch.zeros(8, dtype=torch.uint8)
    target = TargetLayer((NAME,), BundleMemory(0, whole, (whole.view(8, 1),)))
    transfers = LayerTransfers((target,), RecordingTransport(), "under test", decode=decode)
    attach(transfers, BlockTables(16), (target,), {NAME: layer}, runner)

    def run_model(step=None):
        if step is None:
            return runner.model(torch.zeros(1))
        with transfers.step(step):
            runner.model(torch.zeros(1))
            return layer.prepare_kv_cache_update(None)

    return run_model, decode


def test_in_a_step_with_history_the_batchs_metadata_is_asked_for_the_decode_rows(attached):
    run_model, decode = attached
    metadata = {NAME: SimpleNamespace(num_decodes=1, num_decode_tokens=3)}
    with override_forward_context(SimpleNamespace(attn_metadata=metadata)):
        run_model(WITH_HISTORY)

    assert decode.rows == [DecodeRows(1, 3)]


def test_without_history_nothing_is_asked_of_a_forward_context_that_may_be_missing(attached):
    run_model, decode = attached
    run_model(Step())
    run_model()

    assert decode.rows == []
