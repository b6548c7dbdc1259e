"""KVPP on against off, TP 2, one engine pair for each feature: equal to the bit, and different under each fault."""

from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineRun, run_engine, write_plugin
from feature_cases import CASES, DRAFTS_FORGOTTEN, METRICS, SHARED_INDEXERS, FeatureCase
from hugging_face import largest_logprob_error
from recall_runs import REPORT, kvpp, kvpp_every_way, rpc

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORKLOAD, METRICS_AT, REPORT_AT = range(3)
# Decode at the owner, between reports; then sabotaged; both again in place, then the faults, some of which stay.
BEFORE_OWNER, AT_OWNER, AFTER_OWNER, ATTENDED_HERE = 5, 6, 7, 10
BEFORE_IN_PLACE, IN_PLACE, AFTER_IN_PLACE, READ_HERE, FAULTS_AT = 14, 15, 16, 19, 22
PROBES_AT = 2
FORGET = {"kind": "forget prefixes"}
# Block size x width x bytes.
LATENT_PAGE = 16 * 576 * 4
INDEXER_PAGE = 16 * 132
SCRATCH_ALIGNMENT = 2 * 1024 * 1024


class Pair:
    """The two runs of a case; the one with KVPP goes on with each fault."""

    def __init__(self, case: FeatureCase, factory: pytest.TempPathFactory) -> None:
        engine = case.make_engine(factory.mktemp("checkpoint"))
        plain = [case.make_workload(), METRICS]
        faults = [
            action
            for fault in case.faults
            for action in (rpc("restore_transfers"), rpc(*fault), FORGET, case.make_workload())
        ]
        self.case = case
        self.model = Path(engine["model"])
        probes = [rpc(probe) for probe in case.probes]
        self.off = self._run(factory, {**engine, "additional_config": kvpp(False)}, [*plain, *probes])
        at_owner = [
            *(rpc("set_decode", "owner"), FORGET, REPORT, case.make_workload(), REPORT),
            *(rpc("sabotage_decode"), FORGET, case.make_workload()),
            rpc("restore_decode"),
        ]
        in_place = [
            *(rpc("set_decode", "in_place"), FORGET, REPORT, case.make_workload(), REPORT),
            *(rpc("sabotage_decode"), FORGET, case.make_workload()),
            *(rpc("restore_decode"), rpc("set_decode", "transfer")),
        ]
        on = {**engine, "additional_config": kvpp_every_way(True)}
        self.on = self._run(factory, on, [*plain, REPORT, *at_owner, *in_place, *faults])

    def _run(self, factory: pytest.TempPathFactory, engine: dict[str, Any], actions: list[dict[str, Any]]) -> EngineRun:
        folder = factory.mktemp("run")
        if self.case.plugin is not None:
            write_plugin(folder, self.case.plugin)
        return run_engine(
            engine,
            actions,
            folder,
            reference=self.case.reference,
            environment=self.case.environment,
            timeout_seconds=400,
        )

    def count_at_owner(self, counter: str) -> list[float]:
        """What each rank counted with decode at the owner."""
        return self._count(BEFORE_OWNER, AFTER_OWNER, counter)

    def count_in_place(self, counter: str) -> list[float]:
        """What each rank counted with decode in place."""
        return self._count(BEFORE_IN_PLACE, AFTER_IN_PLACE, counter)

    def _count(self, first: int, second: int, counter: str) -> list[float]:
        reports = zip(self.on.actions[first], self.on.actions[second], strict=True)
        return [after["counters"][counter] - before["counters"][counter] for before, after in reports]

    def under_fault(self, index: int) -> Any:
        """What was served under the fault of this index."""
        return self.on.actions[FAULTS_AT + 4 * index + 3]


_pairs: dict[str, Pair] = {}


@pytest.fixture(scope="module")
def get_pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def get(name: str) -> Pair:
        if name not in _pairs:
            case = next(case for case in CASES if case.name == name)
            _pairs[name] = Pair(case, tmp_path_factory)
        return _pairs[name]

    return get


NAMES = pytest.mark.parametrize(
    "name", [pytest.param(case.name, marks=pytest.mark.proves(*case.proves), id=case.name) for case in CASES]
)
FAULTS = pytest.mark.parametrize(
    ("name", "index"),
    [
        pytest.param(case.name, index, id=f"{case.name}: {' '.join(map(str, fault[:2]))}")
        for case in CASES
        for index, fault in enumerate(case.faults)
    ],
)


@NAMES
def test_schedules_and_answers_equal_those_of_a_run_without_kvpp_bit_for_bit(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    assert pair.on.actions[WORKLOAD]["schedule"] == pair.off.actions[WORKLOAD]["schedule"]
    assert pair.on.actions[WORKLOAD]["answers"] == pair.off.actions[WORKLOAD]["answers"]


@NAMES
def test_with_decode_at_the_owner_answers_equal_those_without_kvpp_bit_for_bit(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    assert pair.on.actions[AT_OWNER]["schedule"] == pair.off.actions[WORKLOAD]["schedule"]
    assert pair.on.actions[AT_OWNER]["answers"] == pair.off.actions[WORKLOAD]["answers"]


@NAMES
def test_with_decode_in_place_answers_equal_those_without_kvpp_bit_for_bit(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    assert pair.on.actions[IN_PLACE]["schedule"] == pair.off.actions[WORKLOAD]["schedule"]
    assert pair.on.actions[IN_PLACE]["answers"] == pair.off.actions[WORKLOAD]["answers"]


# With drafts a request has several tokens to verify, which this platform's backend computes as it does a prompt.
DECODING = pytest.mark.parametrize("name", [case.name for case in CASES if not case.has_drafts])


@DECODING
def test_decode_at_the_owner_moves_less_history(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    assert min(pair.count_at_owner("steps_at_owner")) > 0
    moved = [report["counters"]["transferred_blocks"] for report in _reports(pair)]
    assert all(less < more for less, more in zip(pair.count_at_owner("transferred_blocks"), moved, strict=True))


@DECODING
def test_answers_differ_when_decode_attends_to_what_each_rank_holds(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    assert pair.on.actions[ATTENDED_HERE]["answers"] != pair.off.actions[WORKLOAD]["answers"]


# What an indexer has chosen only the owner knows.
READING = pytest.mark.parametrize(
    "name", [case.name for case in CASES if not case.has_drafts and "sparse" not in case.reference]
)


@READING
def test_decode_in_place_moves_no_more_history_than_at_the_owner(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    assert pair.count_in_place("steps_in_place") == pair.count_at_owner("steps_at_owner")
    assert pair.count_in_place("transferred_blocks") == pair.count_at_owner("transferred_blocks")
    assert max(pair.count_in_place("exchanges")) == 0


@READING
def test_answers_differ_when_every_rank_reads_what_it_holds_itself(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    assert pair.on.actions[READ_HERE]["answers"] != pair.off.actions[WORKLOAD]["answers"]


@pytest.mark.parametrize("name", [case.name for case in CASES if case.equals_hugging_face])
def test_answers_without_kvpp_are_those_of_the_hugging_face_model(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    prompts = [request["prompt"] for request in pair.case.make_workload()["requests"]]
    assert largest_logprob_error(pair.model, prompts, pair.off.answers(WORKLOAD)) < 1e-4


@FAULTS
def test_answers_differ_under_each_fault(get_pair: Any, name: str, index: int) -> None:
    pair = get_pair(name)
    served = pair.under_fault(index)
    if pair.case.faults[index] == DRAFTS_FORGOTTEN:
        # Greedy answers do not depend on drafts; how many steps they take does.
        assert served["schedule"] != pair.off.actions[WORKLOAD]["schedule"]
    else:
        assert served["answers"] != pair.off.actions[WORKLOAD]["answers"]


@NAMES
def test_the_workload_came_in_chunks_and_hit_a_prefix(get_pair: Any, name: str) -> None:
    served = get_pair(name).on.actions[WORKLOAD]
    assert any(count == 64 for count in served["schedule"][0].values())
    assert served["answers"][2]["num_cached_tokens"] > 0


@NAMES
def test_more_tokens_fit_within_the_same_memory(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    assert pair.on.num_gpu_blocks > pair.off.num_gpu_blocks
    for report in pair.on.actions[REPORT_AT]:
        assert report["planned_bytes"] == report["allocated_bytes"] <= report["available_bytes"]
        assert report["num_blocks"] == pair.on.num_gpu_blocks


def _reports(pair: Pair) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = pair.on.actions[REPORT_AT]
    return reports


def test_uneven_stages_own_their_layers_once_each(get_pair: Any) -> None:
    owned = [report["owned_layers"] for report in _reports(get_pair("pipeline parallel"))]
    assert owned == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]


def test_every_stage_moves_its_own_layers_only(get_pair: Any) -> None:
    for report, num_layers in zip(_reports(get_pair("pipeline parallel")), (7, 7, 6, 6), strict=True):
        assert report["num_target_layers"] == num_layers
        assert report["counters"]["transfers"] == num_layers * report["counters"]["steps_with_history"] > 0


def test_every_rank_has_draft_caches_in_its_budget_and_they_own_no_layer(get_pair: Any) -> None:
    reports = _reports(get_pair("mtp"))
    assert [report["bytes_per_block"]["draft"] for report in reports] == [LATENT_PAGE, LATENT_PAGE]
    assert [report["owned_layers"] for report in reports] == [[0, 1, 2], [3, 4, 5]]
    for report in reports:
        assert report["counters"]["transfers"] == 6 * report["counters"]["steps_with_history"] > 0


@pytest.mark.parametrize("name", [case.name for case in CASES if case.has_drafts])
def test_as_many_drafts_are_accepted_as_without_kvpp(get_pair: Any, name: str) -> None:
    pair = get_pair(name)
    for metric in ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"):
        assert pair.on.actions[METRICS_AT][metric] == pair.off.actions[METRICS_AT][metric] > 0


@pytest.mark.parametrize("name", ["sparse", "sparse with shared indexers"])
def test_indexer_caches_are_part_of_their_layers_bundle(get_pair: Any, name: str) -> None:
    types = SHARED_INDEXERS if "shared" in name else ("full",) * 8
    for report in _reports(get_pair(name)):
        pages = [LATENT_PAGE + (INDEXER_PAGE if types[number] == "full" else 0) for number in report["owned_layers"]]
        assert report["bytes_per_block"]["owned"] == sum(pages)
        assert report["bytes_per_block"]["scratch"] == 2 * (LATENT_PAGE + INDEXER_PAGE)
        assert report["counters"]["transfers"] == 8 * report["counters"]["steps_with_history"] > 0


def test_two_ranks_really_split_the_experts(get_pair: Any) -> None:
    assert "Local/global number of experts: 4/8" in get_pair("expert parallel").on.log


@pytest.mark.parametrize("name", [case.name for case in CASES if case.probes])
def test_every_layer_is_cut_twice_and_every_piece_is_compiled(get_pair: Any, name: str) -> None:
    run = get_pair(name).off
    for graphs, settings in zip(run.actions[PROBES_AT], run.actions[PROBES_AT + 1], strict=True):
        num_cuts = graphs["num_piecewise_graphs_seen"] - graphs["num_piecewise_capturable_graphs_seen"]
        assert num_cuts == 2 * 8
        assert graphs["num_backend_compilations"] == graphs["num_piecewise_capturable_graphs_seen"] > 8
        assert graphs[f"num_{settings['backend']}_compiles"] > 0


def test_an_fp8_cache_holds_four_times_the_blocks_of_a_float32_one(get_pair: Any) -> None:
    for report in _reports(get_pair("fp8 cache")):
        assert report["bytes_per_block"]["owned"] == 4 * LATENT_PAGE / 4


def test_the_rank_with_less_memory_decides_for_all(get_pair: Any) -> None:
    first, second = _reports(get_pair("unequal memory"))
    assert second["available_bytes"] == first["available_bytes"] // 2
    assert first["num_blocks"] == second["num_blocks"]
    # Not one block more would fit where memory is short, and where there is twice as much it stays free.
    assert second["available_bytes"] - second["planned_bytes"] < second["bytes_per_block"]["total"] + SCRATCH_ALIGNMENT
    assert first["allocated_bytes"] == second["allocated_bytes"]


def test_vllm_fits_the_length_to_the_blocks_of_kvpp(get_pair: Any) -> None:
    pair = get_pair("unequal memory")
    for run in (pair.off, pair.on):
        assert run.max_model_len <= (run.num_gpu_blocks - 1) * run.block_size < run.max_model_len + 2 * run.block_size
    assert pair.on.max_model_len > pair.off.max_model_len
