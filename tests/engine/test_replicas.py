"""Two replicas of an expert-parallel model, DP 2 x TP 2: they step together, and each moves its own layers only."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_moe_checkpoint
from engine_process import EngineRun, bind_workers, run_engine, write_plugin
from recall_runs import RECALL_ENGINE, REPORT, kvpp_every_way, rpc

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_LAYERS = 8
BUSY, IDLE = 0, 1


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _generate(seed: int, *lengths: int) -> dict[str, Any]:
    generator = random.Random(seed)
    prompts = [[generator.randrange(2, 512) for _ in range(30 + 20 * index)] for index, _ in enumerate(lengths)]
    return {"kind": "generate", "prompts": prompts, "lengths": lengths}


# The second replica has one token to compute while the first has dozens, then it is the other way round. No batch has
# one token only: with sequence-parallel experts vLLM 0.32 (and 0.33) then takes a rank's padding for the token, as it
# tells shards by their length, and the copies of the cache that it keeps on other ranks than the first go wrong.
ROUNDS = {BUSY: [_generate(3, 24, 24, 24), _generate(4, 1)], IDLE: [_generate(5, 1), _generate(6, 12, 12)]}


def _run_replicas(is_on: bool, model: Path, factory: pytest.TempPathFactory) -> dict[int, EngineRun]:
    port = str(_free_port())
    engine = {
        **RECALL_ENGINE,
        "model": str(model),
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "additional_config": kvpp_every_way(is_on),
    }

    def run(rank: int) -> EngineRun:
        rounds = ROUNDS[rank]
        report = [REPORT if is_on else rpc("digest_caches")]
        folder = factory.mktemp(f"replica{rank}")
        # The usual collectives of the TP group wait without giving way; four ranks on two CPUs would stand still.
        write_plugin(folder, "rank_equal_sums")
        faulty = [rpc("sabotage_transfers", []), rounds[0]] if is_on else []
        forget = {"kind": "forget prefixes"}
        at_owner = [rpc("restore_transfers"), rpc("set_decode", "owner"), forget, *rounds, *report] if is_on else []
        in_place = [rpc("set_decode", "in_place"), forget, *rounds, *report] if is_on else []
        return run_engine(
            engine,
            [*rounds, *report, *faulty, *at_owner, *in_place],
            folder,
            reference=["chunked_prefill", "expert_parallel", "data_parallel"],
            environment={
                # Of all replicas on the machine; each takes its share.
                "VLLM_CPU_OMP_THREADS_BIND": bind_workers(4),
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_SIZE": "2",
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": port,
            },
            timeout_seconds=400,
        )

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((BUSY, IDLE), pool.map(run, (BUSY, IDLE)), strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[int, EngineRun]]:
    model = write_moe_checkpoint(tmp_path_factory.mktemp("moe"), num_layers=NUM_LAYERS, num_experts=8)
    return {is_on: _run_replicas(is_on, model, tmp_path_factory) for is_on in (False, True)}


def test_without_kvpp_both_ranks_of_a_replica_hold_the_same_cache(runs: dict[bool, dict[int, EngineRun]]) -> None:
    for run in runs[False].values():
        first, second = run.actions[2]
        assert first == second


@pytest.mark.proves("data parallelism", "expert parallelism")
@pytest.mark.parametrize("rank", [BUSY, IDLE])
@pytest.mark.parametrize("turn", [0, 1])
def test_answers_of_each_replica_equal_those_without_kvpp_bit_for_bit(
    runs: dict[bool, dict[int, EngineRun]], rank: int, turn: int
) -> None:
    assert runs[True][rank].answers(turn) == runs[False][rank].answers(turn)


@pytest.mark.proves("data parallelism", "expert parallelism")
@pytest.mark.parametrize("rank", [BUSY, IDLE])
@pytest.mark.parametrize("turn", [0, 1])
def test_answers_with_decode_at_the_owner_equal_those_without_kvpp_bit_for_bit(
    runs: dict[bool, dict[int, EngineRun]], rank: int, turn: int
) -> None:
    assert runs[True][rank].answers(8 + turn) == runs[False][rank].answers(turn)
    for before, after in zip(runs[True][rank].actions[2], runs[True][rank].actions[10], strict=True):
        assert after["counters"]["steps_at_owner"] > before["counters"]["steps_at_owner"] == 0


@pytest.mark.proves("data parallelism", "expert parallelism")
@pytest.mark.parametrize("rank", [BUSY, IDLE])
@pytest.mark.parametrize("turn", [0, 1])
def test_answers_with_decode_in_place_equal_those_without_kvpp_bit_for_bit(
    runs: dict[bool, dict[int, EngineRun]], rank: int, turn: int
) -> None:
    assert runs[True][rank].answers(13 + turn) == runs[False][rank].answers(turn)
    for before, after in zip(runs[True][rank].actions[10], runs[True][rank].actions[15], strict=True):
        assert after["counters"]["steps_in_place"] > before["counters"]["steps_in_place"] == 0


def test_answers_differ_when_nothing_is_moved(runs: dict[bool, dict[int, EngineRun]]) -> None:
    assert runs[True][BUSY].answers(4) != runs[False][BUSY].answers(0)


def test_each_replica_moves_layers_in_its_own_steps_only(runs: dict[bool, dict[int, EngineRun]]) -> None:
    # Decode steps of the longest request of each round; a replica that waits runs dummy steps, which move nothing.
    steps = {BUSY: 23, IDLE: 11}
    for rank, num_steps in steps.items():
        for report in runs[True][rank].actions[2]:
            assert report["counters"]["steps_with_history"] == num_steps
            assert report["counters"]["transfers"] == num_steps * NUM_LAYERS


def test_no_group_crosses_a_replica(runs: dict[bool, dict[int, EngineRun]]) -> None:
    for rank in (BUSY, IDLE):
        for report in runs[True][rank].actions[2]:
            assert len(report["group_ranks"]) == 2
            assert report["group_ranks"][1] == report["group_ranks"][0] + 1
            assert report["owned_layers"] in ([0, 1, 2, 3], [4, 5, 6, 7])
