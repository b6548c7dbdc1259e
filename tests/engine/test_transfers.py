"""Every way to move blocks, on TP 2: equal answers to the bit, and as many bytes as the requests' history takes."""

from typing import Any

import pytest
from engine_process import EngineRun, run_engine
from recall_runs import RECALL_ENGINE, REPORT, kvpp, rpc

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_LAYERS = 8
BLOCK_SIZE = 16
PAGE_BYTES = BLOCK_SIZE * 576 * 4
MODES = ("auto", "active", "full")
# By mode: set it, report, serve, report.
SERVED, BEFORE, AFTER = 2, 1, 3
ACTIONS_BY_MODE = 4
TRACE = -3
OPTIONS_BY_TRANSPORT: dict[str, dict[str, Any]] = {
    "shared memory": {},
    # 113 blocks of a layer at once.
    "broadcast, staged": {"transport": "broadcast", "staging_mib": 4},
}
TRANSPORTS = [
    pytest.param("shared memory", marks=pytest.mark.proves("transfers through shared memory")),
    pytest.param("broadcast, staged", marks=pytest.mark.proves("transfers by broadcast")),
]


@pytest.fixture(scope="module")
def serving(workload: dict[str, Any]) -> dict[str, Any]:
    """The usual questions, arriving one by one."""
    requests = [
        {"prompt": prompt, "max_tokens": length, "arrives": 2 * number}
        for number, (prompt, length) in enumerate(zip(workload["prompts"], workload["lengths"], strict=True))
    ]
    return {"kind": "serve", "name": "question", "requests": requests}


@pytest.fixture(scope="module")
def off_run(serving: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    engine = {**RECALL_ENGINE, "tensor_parallel_size": 2}
    return run_engine(engine, [serving], tmp_path_factory.mktemp("off"))


@pytest.fixture(scope="module", params=TRANSPORTS)
def on_run(request: pytest.FixtureRequest, serving: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = OPTIONS_BY_TRANSPORT[request.param]
    engine = {**RECALL_ENGINE, "tensor_parallel_size": 2, "additional_config": kvpp(True, **options)}
    actions = [action for mode in MODES for action in (rpc("set_transfer", mode), REPORT, serving, REPORT)]
    # Whole layers, which take long enough to be seen.
    actions += [rpc("start_trace"), serving, rpc("stop_trace"), rpc("sabotage_transfers", []), serving]
    return request.param, run_engine(engine, actions, tmp_path_factory.mktemp("on"))


def action_of(run: EngineRun, mode: str, place: int) -> Any:
    return run.actions[MODES.index(mode) * ACTIONS_BY_MODE + place]


def counted(run: EngineRun, mode: str, counter: str) -> list[float]:
    """What each rank counted while it served with this mode."""
    reports = zip(action_of(run, mode, BEFORE), action_of(run, mode, AFTER), strict=True)
    return [after["counters"][counter] - before["counters"][counter] for before, after in reports]


def count_history_blocks(schedule: list[dict[str, int]]) -> int:
    """Blocks that all steps together read of earlier steps; no two requests share one here."""
    computed: dict[str, int] = {}
    num_blocks = 0
    for step in schedule:
        num_blocks += sum(-(-computed.get(request_id, 0) // BLOCK_SIZE) for request_id in step)
        for request_id, num_tokens in step.items():
            computed[request_id] = computed.get(request_id, 0) + num_tokens
    return num_blocks


@pytest.mark.proves("`kvpp.transfer` auto, active, full")
@pytest.mark.parametrize("mode", MODES)
def test_answers_equal_those_without_kvpp_bit_for_bit(off_run: EngineRun, on_run: Any, mode: str) -> None:
    served, expected = action_of(on_run[1], mode, SERVED), off_run.actions[0]
    assert served["schedule"] == expected["schedule"]
    assert served["answers"] == expected["answers"]


def test_answers_differ_when_nothing_is_moved(off_run: EngineRun, on_run: Any) -> None:
    assert on_run[1].actions[-1]["answers"] != off_run.actions[0]["answers"]


@pytest.mark.parametrize("mode", ["auto", "active"])
def test_exactly_the_blocks_of_the_history_are_moved(on_run: Any, mode: str) -> None:
    _, run = on_run
    num_blocks = count_history_blocks(action_of(run, mode, SERVED)["schedule"]) * NUM_LAYERS
    assert num_blocks > 0
    assert counted(run, mode, "transferred_blocks") == [num_blocks] * 2
    assert counted(run, mode, "transferred_bytes") == [num_blocks * PAGE_BYTES] * 2


def test_every_allocated_block_is_moved_if_it_is_asked_for(on_run: Any) -> None:
    _, run = on_run
    (steps, _) = counted(run, "full", "steps_with_history")
    assert counted(run, "full", "transferred_blocks") == [steps * NUM_LAYERS * run.num_gpu_blocks] * 2


def test_the_time_of_transfers_is_counted(on_run: Any) -> None:
    for mode in MODES:
        assert all(seconds > 0 for seconds in counted(on_run[1], mode, "hidden_seconds"))
        assert all(seconds >= 0 for seconds in counted(on_run[1], mode, "waited_seconds"))


def test_a_trace_shows_transfers_while_layers_compute(on_run: Any) -> None:
    for trace in on_run[1].actions[TRACE]:
        transfers = [event for event in trace if event[0] == "kvpp.transfer"]
        waits = [event for event in trace if event[0] == "kvpp.wait"]
        products = [event for event in trace if event[0].startswith("aten::")]
        (computing,) = {thread for _, thread, *_ in waits}
        assert {thread for _, thread, *_ in transfers} != {computing}
        beside = [transfer for transfer in transfers if any(_overlap(transfer, product) for product in products)]
        assert len(beside) > len(transfers) / 4
        assert len(waits) >= NUM_LAYERS


def _overlap(left: Any, right: Any) -> bool:
    return left[1] != right[1] and left[2] < right[3] and right[2] < left[3]


def test_the_log_and_the_report_say_how_blocks_travel(on_run: Any) -> None:
    transport, run = on_run
    name, _, staging = transport.partition(", ")
    assert f"transfer         auto, by {name}, " in run.log
    for report in action_of(run, "auto", BEFORE):
        assert (report["transport"], report["staging_bytes"]) == (name, 4 * 1024**2 if staging else 0)
        assert report["allocated_bytes"] == report["planned_bytes"] <= report["available_bytes"]


def test_scattered_blocks_go_through_staging_memory_where_calls_are_dear(on_run: Any) -> None:
    transport, run = on_run
    calls_by_transfer = counted(run, "auto", "calls")[0] / counted(run, "auto", "transfers")[0]
    if transport == "broadcast, staged":
        # A few steps read one run of blocks, or two, which need no gathering.
        assert 1 <= calls_by_transfer < 1.2
    else:
        assert calls_by_transfer > 1.2
