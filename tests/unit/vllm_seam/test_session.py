import mmap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_kvpp.deployment import Deployment
from vllm_kvpp.errors import KVPPBudgetError, KVPPConfigError
from vllm_kvpp.plan import fit_num_blocks, plan_cache
from vllm_kvpp.selection import ExchangeTraits
from vllm_kvpp.transport.recording import RecordingTransport
from vllm_kvpp.vllm_seam import session as session_module
from vllm_kvpp.vllm_seam.placement import describe_caches
from vllm_kvpp.vllm_seam.session import KVPPSession, find_draft_names

MIB = 1024 * 1024
AVAILABLE = 64 * MIB
# A sixty-fourth, which is the default.
STAGING = MIB
CPU = torch.device("cpu")


class FakeGroup:
    """A group of two ranks that always agree."""

    ranks = (2, 3)
    size = 2
    label = "of ranks [2, 3]"
    device = CPU

    def __init__(self, rank=0, *, shares_memory=False):
        self.rank = rank
        self.shares_memory = shares_memory
        self.agreed = []
        self.made_from = ()
        self.staged_by = ()

    def make(self, *args, **kwargs):
        self.made_from = (*args, kwargs)
        return self

    def gather(self, value):
        return [value] * self.size

    def share(self, tensor):
        return (tensor,) * self.size

    def make_peer_copies(self):
        return RecordingTransport()

    def make_broadcast(self, staging, largest_page_bytes):
        self.staged_by = (0 if staging is None else staging.numel(), largest_page_bytes)
        return RecordingTransport()

    def make_exchange(self, areas):
        self.areas = areas
        return SimpleNamespace(traits=ExchangeTraits(0), max_rows=areas[0].max_rows)

    def check_agreement(self, what, value):
        self.agreed.append((what, value))


class PlainLayer:
    """A layer with a cache that is no attention of vLLM's: nothing of it can attend at the owner."""

    def prepare_kv_cache_update(self, attn_metadata):
        """Nothing to prepare."""


class FakeRunner:
    """A runner with nothing to run."""

    def __init__(self):
        self.model = torch.nn.Identity()

    def get_model(self):
        return self.model

    def execute_model(self, scheduler_output):
        """Nothing to execute."""


def make_config(
    *, layout=KVCacheLayout.LBHNC, override=None, max_model_len=1024, original_max_model_len=None, **options
):
    return SimpleNamespace(
        additional_config={"enable_kvpp": True, "kvpp": {"transfer_timeout_seconds": 7, **options}},
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=override,
            prefix_cache_retention_interval=None,
        ),
        compilation_config=SimpleNamespace(static_forward_context=defaultdict(PlainLayer)),
        model_config=SimpleNamespace(
            max_model_len=max_model_len, original_max_model_len=original_max_model_len, dtype=torch.bfloat16
        ),
        parallel_config=SimpleNamespace(data_parallel_index=0, prefill_context_parallel_size=1),
        speculative_config=None,
    )


@pytest.fixture
def make_session(monkeypatch):
    def make_session(config=None, *, group=None, deployment=None):
        deployment = deployment or Deployment(tensor_parallel_size=2)
        monkeypatch.setattr(session_module, "describe_deployment", lambda vllm_config: deployment)
        monkeypatch.setattr(session_module, "make_group", (group or FakeGroup()).make)
        return KVPPSession(config or make_config(), CPU)

    return make_session


def plan_with_engine(config, specs, logical_bytes):
    """Plan as vLLM's engine does, from the bytes that the worker reports."""
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    return get_kv_cache_config_from_groups(config, [group], logical_bytes)


def test_a_configuration_that_vllm_completed_wrongly_is_refused(make_session):
    with pytest.raises(KVPPConfigError, match="KVPP supports eager execution or PIECEWISE only"):
        make_session(deployment=Deployment(tensor_parallel_size=2, graph_mode="FULL"))


def test_the_group_is_made_with_the_users_timeout(make_session):
    config, group = make_config(), FakeGroup()
    make_session(config, group=group)

    assert group.made_from == (config.parallel_config, CPU, 7.0, {"may_share_memory": True, "may_exchange": True})


def test_a_group_that_is_to_broadcast_does_not_try_to_share_memory(make_session):
    group = FakeGroup()
    make_session(make_config(transport="broadcast"), group=group)

    assert group.made_from[-1]["may_share_memory"] is False


def test_a_group_that_is_to_move_history_does_not_try_an_exchange(make_session):
    group = FakeGroup()
    make_session(make_config(decode="transfer"), group=group)

    assert group.made_from[-1]["may_exchange"] is False


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("indexers", [(), (0, 3)])
def test_the_engine_arrives_at_the_blocks_that_fit(make_session, make_specs, rank, indexers):
    config, specs = make_config(), make_specs(7, indexers=indexers)
    logical_bytes = make_session(config, group=FakeGroup(rank)).plan_budget(specs, AVAILABLE, FakeRunner())
    plan = plan_cache(describe_caches(specs), group_size=2)

    assert plan_with_engine(config, specs, logical_bytes).num_blocks == fit_num_blocks(plan, rank, AVAILABLE, STAGING)


def test_a_stage_without_caches_keeps_its_bytes(make_session):
    assert make_session().plan_budget({}, AVAILABLE, FakeRunner()) == AVAILABLE


def test_the_ranks_compare_their_plans(make_session, make_specs):
    group = FakeGroup()
    make_session(group=group).plan_budget(make_specs(), AVAILABLE, FakeRunner())

    digest = plan_cache(describe_caches(make_specs()), group_size=2).digest
    assert group.agreed == [("the cache plan", digest), ("how decode can reach its history", "transfer")]


def test_the_ranks_compare_their_plans_before_a_rank_refuses_its_budget(make_session, make_specs):
    group = FakeGroup()
    with pytest.raises(KVPPBudgetError):
        make_session(group=group).plan_budget(make_specs(), 1, FakeRunner())

    assert [what for what, _ in group.agreed] == ["the cache plan", "how decode can reach its history"]


def test_a_layout_without_whole_layers_is_refused_with_a_remedy(make_session, make_specs):
    session = make_session(make_config(layout=KVCacheLayout.BLHNC))

    with pytest.raises(KVPPConfigError, match="layout is BLHNC; set the environment variable VLLM_KV_CACHE_LAYOUT to"):
        session.plan_budget(make_specs(), AVAILABLE, FakeRunner())


def test_a_request_of_full_length_that_does_not_fit_is_refused_with_the_length_that_does(make_session, make_specs):
    session = make_session(make_config(max_model_len=1_000_000))
    with pytest.raises(KVPPBudgetError) as caught:
        session.plan_budget(make_specs(), AVAILABLE, FakeRunner())
    num_blocks = fit_num_blocks(plan_cache(describe_caches(make_specs()), group_size=2), 0, AVAILABLE, STAGING)

    assert "One request of max_model_len 1000000 needs 62501 blocks" in str(caught.value)
    assert str(caught.value).endswith(f"lower max_model_len to {(num_blocks - 1) * 16} or less.")


def test_the_length_that_a_refusal_proposes_is_accepted(make_session, make_specs):
    num_blocks = fit_num_blocks(plan_cache(describe_caches(make_specs()), group_size=2), 0, AVAILABLE, STAGING)
    session = make_session(make_config(max_model_len=(num_blocks - 1) * 16))

    assert session.plan_budget(make_specs(), AVAILABLE, FakeRunner()) > 0


def test_a_length_that_vllm_may_shorten_itself_is_not_refused(make_session, make_specs):
    session = make_session(make_config(max_model_len=1_000_000, original_max_model_len=-1))

    assert session.plan_budget(make_specs(), AVAILABLE, FakeRunner()) > 0


def test_more_blocks_by_override_than_fit_are_refused_with_the_number_that_does(make_session, make_specs):
    session = make_session(make_config(override=100_000))
    num_blocks = fit_num_blocks(plan_cache(describe_caches(make_specs()), group_size=2), 0, AVAILABLE, STAGING)

    with pytest.raises(KVPPBudgetError, match=f"Lower num_gpu_blocks_override to {num_blocks} or less"):
        session.plan_budget(make_specs(), AVAILABLE, FakeRunner())


def test_a_refused_budget_says_what_a_block_costs(make_session, make_specs):
    with pytest.raises(KVPPBudgetError) as caught:
        make_session().plan_budget(make_specs(), 1 * MIB, FakeRunner())

    assert (
        "A block costs group rank 0 92,160 bytes (55,296 for its layers [0, 1, 2], 0 for draft layers, 36,864 for two "
        "scratch buffers), and 1,048,576 bytes are available, of which 18,432 are kept for transfers."
        in str(caught.value)
    )


def test_the_engines_placement_is_replaced_by_the_plans(make_session, make_specs):
    config, specs, group = make_config(), make_specs(), FakeGroup()
    session = make_session(config, group=group)
    engine_config = plan_with_engine(config, specs, session.plan_budget(specs, AVAILABLE, FakeRunner()))
    placed = session.place(engine_config)

    assert sum(len(tensor.layers) for tensor in placed.kv_cache_tensors) == 6
    assert all(tensor.size <= AVAILABLE for tensor in placed.kv_cache_tensors)
    assert group.agreed[-1] == ("the number of blocks", engine_config.num_blocks)


def test_blocks_that_need_more_than_is_available_are_refused(make_session, make_specs):
    config, specs = make_config(), make_specs()
    session = make_session(config)
    logical_bytes = session.plan_budget(specs, AVAILABLE, FakeRunner())

    with pytest.raises(KVPPBudgetError, match=r"but 67,108,864 are available"):
        session.place(plan_with_engine(config, specs, 2 * logical_bytes))


def test_a_model_whose_layers_vllm_split_into_groups_is_refused(make_session, make_specs):
    config, specs = make_config(), make_specs()
    session = make_session(config)
    engine_config = plan_with_engine(config, specs, session.plan_budget(specs, AVAILABLE, FakeRunner()))
    engine_config.kv_cache_groups *= 2

    with pytest.raises(KVPPConfigError, match="vLLM made 2 KV cache groups"):
        session.place(engine_config)


def test_a_stage_without_a_plan_leaves_the_configuration_as_it_is(make_session, make_specs):
    engine_config = plan_with_engine(make_config(), make_specs(), AVAILABLE)

    assert make_session().place(engine_config) is engine_config


def run_to_attachment(make_session, specs, *, group=None, **options):
    """Plan, place, let vLLM allocate, bind and attach."""
    config, runner = make_config(**options), FakeRunner()
    session = make_session(config, group=group)
    placed = session.place(plan_with_engine(config, specs, session.plan_budget(specs, AVAILABLE, runner)))
    for name, cache in allocate_kv_cache(placed, CPU, KVCacheLayout.LBHNC).items():
        config.compilation_config.static_forward_context[name].kv_cache = cache
    session.attach(runner)
    return session


def test_the_report_holds_plan_allocation_and_counters(make_session, make_specs):
    report = run_to_attachment(make_session, make_specs()).report()

    assert report["owned_layers"] == [0, 1, 2]
    assert report["group_ranks"] == [2, 3]
    assert report["allocated_bytes"] == report["planned_bytes"] <= report["available_bytes"] == AVAILABLE
    assert report["counters"]["transfers"] == 0


def test_by_default_broadcasts_get_staging_memory_inside_the_budget(make_session, make_specs):
    group = FakeGroup()
    report = run_to_attachment(make_session, make_specs(), group=group).report()

    assert group.staged_by == (STAGING, 18_432)
    assert (report["transfer"], report["transport"], report["staging_bytes"]) == ("auto", "broadcast", STAGING)


def test_staging_memory_of_the_size_asked_for_is_inside_the_budget(make_session, make_specs):
    group = FakeGroup()
    report = run_to_attachment(make_session, make_specs(), group=group, staging_mib=3).report()

    assert group.staged_by == (3 * MIB, 18_432)
    assert report["allocated_bytes"] <= AVAILABLE


def test_whole_layers_need_no_staging_memory(make_session, make_specs):
    group = FakeGroup()
    session = run_to_attachment(make_session, make_specs(), group=group, transfer="full")

    assert group.staged_by == (0, 18_432)
    assert session.transfers.transfer == "full"


def test_staging_memory_that_leaves_no_block_is_refused_with_the_range(make_session, make_specs):
    session = make_session(make_config(staging_mib=64))

    with pytest.raises(
        KVPPBudgetError, match=r"kvpp\.staging_mib is 64, but it has to be between 0\.0175781 .* and 63\.9"
    ):
        session.plan_budget(make_specs(), AVAILABLE, FakeRunner())


def test_ranks_that_share_memory_read_each_others_and_stage_nothing(make_session, make_specs):
    session = run_to_attachment(make_session, make_specs(), group=FakeGroup(shares_memory=True))

    report = session.report()

    assert (report["transport"], report["staging_bytes"]) == ("shared memory", 0)
    # The last page of the allocation may not be whole, so no cache lies in it.
    assert report["allocated_bytes"] == report["planned_bytes"] <= AVAILABLE
    last_cache = max(placed.range.end for placed in session._summary.placement.caches)
    assert last_cache <= report["allocated_bytes"] - mmap.PAGESIZE
    assert [bool(layer.memory.source) for layer in session.transfers._layers] == [False] * 3 + [True] * 3


def test_before_the_cache_is_bound_the_report_knows_the_group_only(make_session):
    assert make_session().report() == {"group_ranks": [2, 3], "allocated_bytes": 0, "counters": {}}


def test_a_stage_without_a_plan_attaches_to_nothing(make_session):
    session, runner = make_session(), FakeRunner()
    session.attach(runner)

    assert session.transfers is None
    assert "execute_model" not in vars(runner)


def test_without_speculation_there_are_no_draft_layers():
    runner = SimpleNamespace(drafter=SimpleNamespace(_draft_attn_layer_names={"model.layers.61.attn"}))

    assert find_draft_names(SimpleNamespace(speculative_config=None), {}, runner) == frozenset()


def test_draft_layers_are_those_that_the_drafter_loaded():
    runner = SimpleNamespace(drafter=SimpleNamespace(_draft_attn_layer_names={"model.layers.61.attn"}))

    assert find_draft_names(SimpleNamespace(speculative_config="mtp"), {}, runner) == {"model.layers.61.attn"}


def test_draft_layers_of_runner_v2_are_those_that_the_speculator_loaded():
    runner = SimpleNamespace(speculator=SimpleNamespace(draft_attn_layer_names={"model.layers.61.attn"}))

    assert find_draft_names(SimpleNamespace(speculative_config="mtp"), {}, runner) == {"model.layers.61.attn"}


@pytest.mark.parametrize("runner", [SimpleNamespace(), SimpleNamespace(drafter=None), SimpleNamespace(speculator=None)])
def test_a_stage_without_a_drafter_has_no_draft_layers(runner):
    assert find_draft_names(SimpleNamespace(speculative_config="mtp"), {}, runner) == frozenset()


@pytest.mark.parametrize("name", ["drafter", "speculator"])
def test_a_drafter_that_does_not_say_what_it_loaded_stops_the_start(name):
    with pytest.raises(AttributeError, match="draft_attn_layer_names"):
        find_draft_names(SimpleNamespace(speculative_config="mtp"), {}, SimpleNamespace(**{name: SimpleNamespace()}))


def test_layers_whose_specs_say_so_are_drafts_beside_those_that_the_drafter_names():
    specs = {f"layers.{number}.attn": SimpleNamespace(is_draft=number == 2) for number in range(3)}
    runner = SimpleNamespace(drafter=SimpleNamespace(_draft_attn_layer_names={"layers.3.shares.attn"}))

    names = find_draft_names(SimpleNamespace(speculative_config="mtp"), specs, runner)

    assert names == {"layers.2.attn", "layers.3.shares.attn"}
