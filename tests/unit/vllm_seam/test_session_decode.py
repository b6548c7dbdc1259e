"""What a session keeps and makes for decode rows that attend at the owners."""

import mmap
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_kvpp.deployment import Deployment
from vllm_kvpp.errors import KVPPBudgetError
from vllm_kvpp.plan import plan_exchange
from vllm_kvpp.selection import ExchangeTraits, QueryShape
from vllm_kvpp.transport.owner_reads import OwnerReads
from vllm_kvpp.transport.recording import RecordingTransport
from vllm_kvpp.vllm_seam import session as session_module
from vllm_kvpp.vllm_seam.session import KVPPSession

AVAILABLE = 64 * 1024 * 1024
CPU = torch.device("cpu")
# Of the fake attention on two ranks.
QUERIES = QueryShape(4, 2, query_width=6, output_width=4, element_bytes=2)
EXCHANGE = plan_exchange(QUERIES, AVAILABLE)


class FakeGroup:
    """A group of two ranks that always agree, but for the `least` that another rank has."""

    ranks = (2, 3)
    size = 2
    rank = 0
    label = "of ranks [2, 3]"
    device = CPU

    def __init__(self, *, shares_memory=False, least=None):
        self.shares_memory = shares_memory
        self.least = least
        self.areas = []
        self.staging = None
        self.agreed = {}

    def gather(self, value):
        return [value, value if self.least is None else min(value, self.least)]

    def share(self, tensor):
        """As mappings for reading: written to, nothing would reach the other ranks."""
        return tensor.clone(), tensor.clone()

    def make_peer_copies(self):
        return RecordingTransport()

    def make_broadcast(self, staging, largest_page_bytes):
        self.staging = staging
        return RecordingTransport()

    def make_exchange(self, areas):
        self.areas = areas
        return SimpleNamespace(traits=ExchangeTraits(0), max_rows=areas[0].max_rows)

    def make_reads(self):
        assert self.agreed["how decode can reach its history"] == "in_place, owner"
        return OwnerReads(SimpleNamespace(peers=(1,)))

    def check_agreement(self, what, value):
        """They always agree."""
        self.agreed[what] = value


class FakeRunner:
    """A runner with nothing to run."""

    def __init__(self, model):
        self.model = model

    def get_model(self):
        return self.model

    def execute_model(self, scheduler_output):
        """Nothing to execute."""


@pytest.fixture
def run_to_attachment(monkeypatch, make_model, make_specs):
    """Plan, place, let vLLM allocate, bind and attach; return the session and the modules."""

    def run_to_attachment(group=None, *, available_bytes=AVAILABLE, backend="CPU_MLA", **options):
        group = group or FakeGroup()
        monkeypatch.setattr(session_module, "describe_deployment", lambda config: Deployment(tensor_parallel_size=2))
        monkeypatch.setattr(session_module, "make_group", lambda *args, **kwargs: group)
        modules, model = make_model(6, backend=backend)
        config = SimpleNamespace(
            additional_config={"enable_kvpp": True, "kvpp": options},
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
                num_gpu_blocks_override=None,
                prefix_cache_retention_interval=None,
            ),
            compilation_config=SimpleNamespace(static_forward_context=modules),
            model_config=SimpleNamespace(max_model_len=64, original_max_model_len=None, dtype=torch.bfloat16),
            parallel_config=SimpleNamespace(data_parallel_index=0, prefill_context_parallel_size=1),
            speculative_config=None,
        )
        session, specs, runner = KVPPSession(config, CPU), make_specs(6), FakeRunner(model)
        logical_bytes = session.plan_budget(specs, available_bytes, runner)
        groups = [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))]
        placed = session.place(get_kv_cache_config_from_groups(config, groups, logical_bytes))
        for name, cache in allocate_kv_cache(placed, CPU, KVCacheLayout.LBHNC).items():
            modules[name].kv_cache = cache
        session.attach(runner)
        return session, modules

    return run_to_attachment


def tail_of(session):
    return session._summary.placement.tail


@pytest.mark.parametrize("decode", ["auto", "owner"])
def test_the_exchange_memory_is_inside_the_budget_and_reported(run_to_attachment, decode):
    report = run_to_attachment(decode=decode)[0].report()

    assert (report["decode"], report["exchange_bytes"]) == (decode, EXCHANGE)
    assert report["allocated_bytes"] == report["planned_bytes"] <= AVAILABLE


def test_staging_memory_lies_behind_the_exchange_memory(run_to_attachment):
    group = FakeGroup()
    session, _ = run_to_attachment(group)
    exchange = group.areas[0]

    assert exchange.max_rows == EXCHANGE // QUERIES.exchange_row_bytes
    assert group.staging.data_ptr() - exchange.own_query.data_ptr() == EXCHANGE
    assert tail_of(session).num_bytes == EXCHANGE + group.staging.numel()
    assert session.report()["staging_bytes"] == group.staging.numel()


def test_ranks_that_share_memory_exchange_through_every_ranks_and_keep_a_page_behind(run_to_attachment):
    group = FakeGroup(shares_memory=True)
    session, _ = run_to_attachment(group, decode="owner")

    assert len(group.areas) == 2
    assert tail_of(session).num_bytes == EXCHANGE + mmap.PAGESIZE
    assert session.report()["staging_bytes"] == 0


def test_a_rank_writes_its_queries_into_the_allocation_itself(run_to_attachment):
    group = FakeGroup(shares_memory=True)
    session, modules = run_to_attachment(group, decode="owner")
    allocation = modules["model.layers.0.attn"].kv_cache.untyped_storage()
    own, others = group.areas

    assert own.own_query.data_ptr() - allocation.data_ptr() == tail_of(session).offset
    assert others.own_query.untyped_storage().data_ptr() != allocation.data_ptr()


def test_a_group_takes_the_smallest_exchange_memory_of_its_ranks(run_to_attachment):
    session, _ = run_to_attachment(FakeGroup(least=EXCHANGE // 2))

    assert session.report()["exchange_bytes"] == EXCHANGE // 2


def test_a_rank_without_exchange_memory_lets_the_group_move_history(run_to_attachment):
    group = FakeGroup(least=0)
    session, _ = run_to_attachment(group)

    assert (session.report()["decode"], session.report()["exchange_bytes"]) == ("transfer", 0)
    assert session.transfers.decode is None
    assert group.areas == []


@pytest.mark.parametrize("options", [{"decode": "transfer"}, {"backend": "FLASHMLA"}], ids=["transfer", "unable"])
def test_what_does_not_attend_at_the_owner_keeps_no_memory_for_it(run_to_attachment, options):
    group = FakeGroup()
    session, modules = run_to_attachment(group, **options)

    assert (session.report()["decode"], session.report()["exchange_bytes"]) == ("transfer", 0)
    assert session.transfers.decode is None
    assert not any("forward_mqa" in vars(module.impl) for module in modules.values())


def test_the_layers_of_a_stage_attend_by_the_mode_asked_for(run_to_attachment):
    session, modules = run_to_attachment(decode="owner")

    assert session.transfers.decode.mode == "owner"
    assert all("forward_mqa" in vars(module.impl) for module in modules.values())


def test_owner_with_a_memory_too_small_for_one_query_is_refused_with_what_it_takes(run_to_attachment):
    with pytest.raises(KVPPBudgetError) as caught:
        run_to_attachment(decode="owner", available_bytes=128 * QUERIES.exchange_row_bytes - 1)

    assert str(caught.value).startswith(
        f"kvpp.decode is owner, but the KV cache memory of {128 * 120 - 1:,} bytes is too small for the exchange of "
        "one query (120 bytes, of 1/128 of it)."
    )


@pytest.mark.parametrize("decode", ["auto", "in_place"])
def test_ranks_that_share_memory_read_in_place_and_keep_no_memory_for_queries(run_to_attachment, decode):
    group = FakeGroup(shares_memory=True)
    session, modules = run_to_attachment(group, decode=decode)

    assert (session.report()["decode"], session.report()["exchange_bytes"]) == ("in_place", 0)
    assert tail_of(session).num_bytes == mmap.PAGESIZE
    assert group.areas == []
    assert all("forward_mqa" in vars(module.impl) for module in modules.values())


def test_in_place_needs_no_memory_however_little_there_is(run_to_attachment):
    group = FakeGroup(shares_memory=True, least=0)
    session, _ = run_to_attachment(group, decode="in_place")

    assert session.report()["decode"] == "in_place"
