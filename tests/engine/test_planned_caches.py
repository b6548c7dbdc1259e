"""`vllm-kvpp plan` against real engines: the same caches to the byte and the same blocks, from the same config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_config
from engine_process import EngineRun, run_engine
from feature_cases import CASES, STAGES
from recall_runs import REPORT, kvpp, rpc

from vllm_kvpp.plan import LayerCache, place
from vllm_kvpp.planner.capacity import StageCapacity
from vllm_kvpp.planner.planning import Plan, PlanOptions, make_plan

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# No whole number of blocks of any shape, so that it shows how both round.
KV_BYTES = 48 * 1024 * 1024 + 12_345
CACHES_AT, REPORT_AT = range(2)
DESCRIBE = rpc("describe_caches")


@dataclass(frozen=True)
class Shape:
    """A model and its deployment: what the engine is started with, and what the plan is asked."""

    name: str
    engine: Callable[[Path], dict[str, Any]]
    asked: Mapping[str, Any]
    reference: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def _make_dense(folder: Path) -> dict[str, Any]:
    """Nine layers, so that ranks own different numbers of them; bfloat16, by the checkpoint."""
    return {
        "model": str(write_config(folder, num_layers=9)),
        "load_format": "dummy",
        "dtype": "auto",
        "max_model_len": 256,
        "tensor_parallel_size": 4,
    }


def _take_from(feature: str, **asked: Any) -> Shape:
    """A shape with the engine of a feature that is compared with KVPP on and off; those run in float32 on TP 2."""
    (case,) = (case for case in CASES if case.name == feature)
    asked = {"tp_size": 2, "dtype": "float32", **asked}
    return Shape(feature, case.make_engine, asked, case.reference, case.environment)


SHAPES = (
    Shape("dense, TP 4", _make_dense, {"tp_size": 4}),
    _take_from("sparse"),
    _take_from("sparse with shared indexers"),
    _take_from("mtp", draft="mtp"),
    _take_from("fp8 cache", kv_cache_dtype="fp8"),
    _take_from("pipeline parallel", pp_size=2, pp_partition=",".join(map(str, STAGES))),
)


@dataclass(frozen=True)
class Comparison:
    """What an engine said, and what was planned from the memory that its ranks reported."""

    shape: Shape
    engine: dict[str, Any]
    run: EngineRun
    plan: Plan

    @property
    def reports(self) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = self.run.actions[REPORT_AT]
        return reports

    def stage_of(self, rank: int) -> StageCapacity:
        """The plan of the stage of a rank; a stage's ranks come one after another."""
        return self.plan.capacity.stages[rank // self.plan.capacity.group_size]


def _start(shape: Shape, engine: dict[str, Any], actions: list[dict[str, Any]], folder: Path) -> EngineRun:
    return run_engine(
        engine, actions, folder, reference=shape.reference, environment=shape.environment, timeout_seconds=400
    )


def _compare(shape: Shape, factory: pytest.TempPathFactory) -> Comparison:
    engine = {**shape.engine(factory.mktemp("checkpoint")), "kv_cache_memory_bytes": KV_BYTES}
    run = _start(shape, {**engine, "additional_config": kvpp(True)}, [DESCRIBE, REPORT], factory.mktemp("run"))
    (available_bytes,) = {report["available_bytes"] for report in run.actions[REPORT_AT]}
    options = PlanOptions(
        engine["model"],
        kv_memory=f"{available_bytes}B",
        block_size=run.block_size,
        transport="shared-memory",
        **shape.asked,
    )
    return Comparison(shape, engine, run, make_plan(options))


_compared: dict[str, Comparison] = {}


@pytest.fixture(params=SHAPES, ids=[shape.name for shape in SHAPES])
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Each shape in turn; its engine is started once."""
    shape: Shape = request.param
    if shape.name not in _compared:
        _compared[shape.name] = _compare(shape, tmp_path_factory)
    return _compared[shape.name]


def _list_pages(caches: tuple[LayerCache, ...]) -> dict[str, int]:
    return {cache.name: cache.page_size_bytes for cache in caches}


def test_every_rank_has_the_planned_caches_by_name_and_to_the_byte(compared: Comparison) -> None:
    for rank, found in enumerate(compared.run.actions[CACHES_AT]):
        plan = compared.stage_of(rank).plan
        targets = tuple(cache for bundle in plan.bundles for cache in bundle.components)
        assert found["page_bytes"] == _list_pages((*targets, *plan.draft_caches))
        assert found["drafts"] == sorted(cache.name for cache in plan.draft_caches)


def test_the_engine_has_the_planned_number_of_blocks(compared: Comparison) -> None:
    assert compared.run.num_gpu_blocks == compared.plan.capacity.num_blocks
    assert f"KV cache size: {compared.plan.fit.num_tokens:,} tokens" in compared.run.log


def test_every_rank_owns_the_planned_layers_and_pays_the_planned_bytes(compared: Comparison) -> None:
    for rank, report in enumerate(compared.reports):
        stage = compared.stage_of(rank)
        planned = stage.ranks[report["group_rank"]]
        assert report["owned_layers"] == list(planned.owned_layers)
        assert report["bytes_per_block"] == {
            "owned": planned.bytes_per_block.owned,
            "draft": planned.bytes_per_block.draft,
            "scratch": planned.bytes_per_block.scratch,
            "total": planned.bytes_per_block.total,
            "without_kvpp": stage.plan.full_bytes_per_block,
        }


def test_every_rank_allocates_the_planned_bytes(compared: Comparison) -> None:
    num_blocks = compared.plan.capacity.num_blocks
    for rank, report in enumerate(compared.reports):
        stage = compared.stage_of(rank)
        placement = place(stage.plan, report["group_rank"], num_blocks, stage.tail_bytes)
        assert report["allocated_bytes"] == placement.num_bytes


def test_the_shapes_differ_in_what_they_are_here_for(compared: Comparison) -> None:
    stages = compared.plan.capacity.stages
    kinds = {
        "dense, TP 4": [len(rank.owned_layers) for rank in stages[0].ranks] == [3, 2, 2, 2],
        "sparse": {len(bundle.components) for bundle in stages[0].plan.bundles} == {2},
        "sparse with shared indexers": {len(bundle.components) for bundle in stages[0].plan.bundles} == {1, 2},
        "mtp": len(stages[0].plan.draft_caches) == 1,
        "fp8 cache": stages[0].plan.bundles[0].page_size_bytes == 16 * 576,
        "pipeline parallel": [len(stage.layers) for stage in stages] == [7, 6],
    }
    assert kinds[compared.shape.name]


def test_without_kvpp_vllm_has_the_blocks_that_the_plan_names_for_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = next(shape for shape in SHAPES if shape.name == "mtp")
    if shape.name not in _compared:
        _compared[shape.name] = _compare(shape, tmp_path_factory)
    compared = _compared[shape.name]
    run = _start(
        shape, {**compared.engine, "additional_config": kvpp(False)}, [DESCRIBE], tmp_path_factory.mktemp("off")
    )

    assert run.num_gpu_blocks == compared.plan.capacity.num_blocks_without
    assert run.actions[CACHES_AT] == compared.run.actions[CACHES_AT]
