"""KVPP on against off, TP 2, through everything that the scheduler does to requests; equal to the bit, step by step."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from engine_process import EngineRun, run_engine
from hugging_face import largest_logprob_error
from recall_runs import RECALL_ENGINE, REPORT, kvpp_every_way, rpc

from vllm_kvpp.demo.recall_task import CHECKPOINT_DIR

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE = 16
NUM_LAYERS = 8
GENERATOR = random.Random(11)
# A pool in which eight requests of the scenarios cannot run at once, and finished ones are soon overwritten.
SMALL_POOL_BLOCKS = 40


def _words(count: int) -> list[int]:
    return [GENERATOR.randrange(4, 132) for _ in range(count)]


@dataclass(frozen=True)
class Scenario:
    """Requests that run together; `forget` clears the prefix cache before."""

    name: str
    requests: tuple[dict[str, Any], ...]
    chunk_size: int | None = None
    forget: bool = True
    proves: tuple[str, ...] = ()

    def actions(self) -> list[dict[str, Any]]:
        serve = {"kind": "serve", "name": self.name, "requests": self.requests, "chunk_size": self.chunk_size}
        return [*([{"kind": "forget prefixes"}] if self.forget else []), serve]


def _request(prompt: list[int], max_tokens: int, **timing: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, **timing}


LONG = [_words(length) for length in (100, 117, 128, 150)]
PREFIX = _words(70)
SHARERS = (
    _request(PREFIX + _words(30), 6),
    # 4 whole blocks of the prefix are hit, the fifth is partly shared and computed again.
    _request(PREFIX + _words(13), 6, arrives=12),
    # The whole prompt is known and ends with a block: all but the last block is hit.
    _request(PREFIX[:64], 6, arrives=20),
    _request(PREFIX + _words(45), 6, arrives=20),
)
MIXED = tuple(_request(_words(20 + 17 * index), 12, arrives=3 * index) for index in range(6))
ABORTED = (
    _request(_words(90), 20, aborts=2),
    _request(_words(40), 20, arrives=1, aborts=9),
    _request(_words(60), 15, arrives=2),
    _request(_words(33), 15, arrives=10),
)
CROWD_PROMPTS = [_words(20 + 3 * index) for index in range(32)]
AMPLE = (
    *(
        Scenario(
            f"chunks of {size or 'any size'}",
            tuple(_request(prompt, 8) for prompt in LONG),
            chunk_size=size,
            proves=("chunked prefill",) if size else (),
        )
        for size in (16, 40, 99, None)
    ),
    Scenario("prefix hits", SHARERS, proves=("prefix caching",)),
    Scenario("prefix hits in chunks", SHARERS, chunk_size=24, proves=("prefix caching", "chunked prefill")),
    Scenario("prefills join decodes", MIXED, chunk_size=32, proves=("mixed batches", "chunked prefill")),
    Scenario("aborts", ABORTED, chunk_size=32, proves=("aborts",)),
    *(
        Scenario(
            f"{count} at once",
            tuple(_request(prompt, 5) for prompt in CROWD_PROMPTS[:count]),
            proves=("many requests at once",),
        )
        for count in (1, 2, 3, 8, 32)
    ),
)
CROWD = tuple(_request(_words(60 + 5 * index), 30, arrives=index) for index in range(8))
RETURN = (_request(CROWD[0]["prompt"] + _words(20), 10), _request(_words(150), 10), _request(_words(150), 10))
SCARCE = (
    Scenario("preemptions", CROWD, proves=("preemption and resumption", "num_gpu_blocks_override")),
    Scenario(
        "evictions",
        (*RETURN, *({**request, "arrives": 40 + index} for index, request in enumerate(RETURN))),
        proves=("prefix caching",),
    ),
    Scenario("preemptions on used blocks", CROWD, forget=False, proves=("preemption and resumption",)),
)
POOLS = {"ample": AMPLE, "scarce": SCARCE}
SCENARIOS = [
    pytest.param(pool, scenario, id=scenario.name, marks=pytest.mark.proves(*scenario.proves))
    for pool, some in POOLS.items()
    for scenario in some
]


class Pair:
    """The runs of one pool, off and on; on goes on with transfers stopped, with decode at the owner, and in place."""

    def __init__(self, pool: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._scenarios = POOLS[pool]
        actions = [action for scenario in self._scenarios for action in scenario.actions()]
        self._index = {action["name"]: index for index, action in enumerate(actions) if action["kind"] == "serve"}
        self._num_actions = len(actions)
        # With a report behind each scenario.
        decoded = [action for scenario in self._scenarios for action in (*scenario.actions(), REPORT)]
        self._decoded = {action["name"]: index for index, action in enumerate(decoded) if action["kind"] == "serve"}
        first = 2 * self._num_actions + 4
        self._first_by_mode = {"owner": first, "in_place": first + len(decoded) + 1}
        engine = {
            **RECALL_ENGINE,
            "tensor_parallel_size": 2,
            "max_num_seqs": 32,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 2048,
            **({"num_gpu_blocks_override": SMALL_POOL_BLOCKS} if pool == "scarce" else {}),
        }
        self.off, self.on = (
            run_engine(
                {**engine, "additional_config": kvpp_every_way(is_on)},
                [
                    *(*actions, REPORT, rpc("sabotage_transfers", []), *actions),
                    *(rpc("restore_transfers"), rpc("set_decode", "owner"), *decoded),
                    *(rpc("set_decode", "in_place"), *decoded),
                ]
                if is_on
                else actions,
                tmp_path_factory.mktemp(pool),
                reference=["chunked_prefill"],
            )
            for is_on in (False, True)
        )

    @property
    def report(self) -> list[dict[str, Any]]:
        return self.on.actions[self._num_actions]

    def served(self, run: EngineRun, scenario: Scenario) -> Any:
        return run.actions[self._index[scenario.name]]

    def answers_off(self, scenario: Scenario) -> tuple[Any, ...]:
        return self.off.answers(self._index[scenario.name])

    def decoded(self, mode: str, scenario: Scenario) -> Any:
        """What was served with this `kvpp.decode`."""
        return self.on.actions[self._first_by_mode[mode] + self._decoded[scenario.name]]

    def counted(self, mode: str, scenario: Scenario, counter: str) -> list[float]:
        """What each rank counted by the end of the scenario, since the last scenario's end."""
        index = self._first_by_mode[mode] + self._decoded[scenario.name]
        # Behind this scenario, and behind the one before, which the forgetting of prefixes follows.
        reports = zip(self.on.actions[index - 1 - scenario.forget], self.on.actions[index + 1], strict=True)
        return [after["counters"][counter] - before["counters"][counter] for before, after in reports]

    def served_sabotaged(self, scenario: Scenario) -> Any:
        return self.on.actions[self._num_actions + 2 + self._index[scenario.name]]


class Pairs(dict[str, Pair]):
    """The pair of each pool, run when it is first asked for: each test's time limit holds for one of them."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, pool: str) -> Pair:
        self[pool] = pair = Pair(pool, self._factory)
        return pair


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory)


@pytest.mark.parametrize(("pool", "scenario"), SCENARIOS)
def test_schedules_and_answers_equal_those_without_kvpp_bit_for_bit(
    pairs: Pairs, pool: str, scenario: Scenario
) -> None:
    pair = pairs[pool]
    off, on = pair.served(pair.off, scenario), pair.served(pair.on, scenario)
    assert on["schedule"] == off["schedule"]
    assert on["answers"] == off["answers"]


@pytest.mark.parametrize(("pool", "scenario"), SCENARIOS)
def test_with_decode_at_the_owner_schedules_and_answers_equal_those_without_kvpp_bit_for_bit(
    pairs: Pairs, pool: str, scenario: Scenario
) -> None:
    pair = pairs[pool]
    off, on = pair.served(pair.off, scenario), pair.decoded("owner", scenario)
    assert on["schedule"] == off["schedule"]
    assert on["answers"] == off["answers"]


@pytest.mark.parametrize(("pool", "scenario"), SCENARIOS)
def test_with_decode_in_place_schedules_and_answers_equal_those_without_kvpp_bit_for_bit(
    pairs: Pairs, pool: str, scenario: Scenario
) -> None:
    pair = pairs[pool]
    off, on = pair.served(pair.off, scenario), pair.decoded("in_place", scenario)
    assert on["schedule"] == off["schedule"]
    assert on["answers"] == off["answers"]


@pytest.mark.parametrize("mode", ["owner", "in_place"])
def test_in_mixed_steps_only_the_prompts_history_is_moved(pairs: Pairs, mode: str) -> None:
    pool, scenario = _scenario("prefills join decodes")
    pair = pairs[pool]
    schedule = pair.decoded(mode, scenario)["schedule"]
    num_mixed, num_blocks = _count_prompt_blocks(schedule)
    assert num_mixed > 0
    assert pair.counted(mode, scenario, "transferred_blocks") == [num_blocks * NUM_LAYERS] * 2
    with_decodes = sum(1 in step.values() for step in schedule)
    counter = {"owner": "steps_at_owner", "in_place": "steps_in_place"}[mode]
    assert pair.counted(mode, scenario, counter) == [with_decodes] * 2


def _count_prompt_blocks(schedule: list[dict[str, int]]) -> tuple[int, int]:
    """Steps that decode beside a prompt with history, and the blocks of such prompts; none is shared here."""
    computed: dict[str, int] = {}
    num_mixed = num_blocks = 0
    for step in schedule:
        prompts = [name for name, count in step.items() if count > 1 and computed.get(name, 0) > 0]
        num_mixed += bool(prompts) and 1 in step.values()
        num_blocks += sum(-(-computed[name] // BLOCK_SIZE) for name in prompts)
        for name, count in step.items():
            computed[name] = computed.get(name, 0) + count
    return num_mixed, num_blocks


@pytest.mark.parametrize(
    "name", ["chunks of 16", "chunks of 99", "prefix hits", "prefix hits in chunks", "evictions", "preemptions"]
)
def test_answers_without_kvpp_are_those_of_the_hugging_face_model(pairs: Pairs, name: str) -> None:
    pool, scenario = _scenario(name)
    prompts = [request["prompt"] for request in scenario.requests]
    assert largest_logprob_error(CHECKPOINT_DIR, prompts, pairs[pool].answers_off(scenario)) < 1e-4


@pytest.mark.parametrize(("pool", "scenario"), SCENARIOS)
def test_answers_differ_when_nothing_is_moved(pairs: Pairs, pool: str, scenario: Scenario) -> None:
    pair = pairs[pool]
    assert pair.served_sabotaged(scenario)["answers"] != pair.served(pair.off, scenario)["answers"]


def _scenario(name: str) -> tuple[str, Scenario]:
    return next((pool, scenario) for pool, some in POOLS.items() for scenario in some if scenario.name == name)


def _on(pairs: Pairs, name: str) -> Any:
    pool, scenario = _scenario(name)
    return pairs[pool].served(pairs[pool].on, scenario)


@pytest.mark.parametrize("size", [16, 40, 99])
def test_prompts_were_really_computed_in_chunks(pairs: Pairs, size: int) -> None:
    steps = _on(pairs, f"chunks of {size}")["schedule"]
    assert max(sum(step.values()) for step in steps) == size
    assert sum(sum(step.values()) for step in steps) == sum(map(len, LONG)) + len(LONG) * 7


@pytest.mark.parametrize("name", ["prefix hits", "prefix hits in chunks"])
def test_prefixes_were_really_hit_up_to_the_last_whole_block(pairs: Pairs, name: str) -> None:
    cached = [answer["num_cached_tokens"] for answer in _on(pairs, name)["answers"]]
    assert cached == [0, 64, 48, 64]


def test_prefills_really_joined_decodes(pairs: Pairs) -> None:
    steps = _on(pairs, "prefills join decodes")["schedule"]
    assert any(1 in step.values() and max(step.values()) > 1 for step in steps)


def test_requests_were_really_aborted_in_the_middle(pairs: Pairs) -> None:
    answers = _on(pairs, "aborts")["answers"]
    assert [len(answer["token_ids"]) if answer else 0 for answer in answers[2:]] == [15, 15]
    assert all(answer is None or len(answer["token_ids"]) < 20 for answer in answers[:2])


@pytest.mark.parametrize("count", [1, 2, 3, 8, 32])
def test_requests_really_ran_at_once(pairs: Pairs, count: int) -> None:
    assert max(len(step) for step in _on(pairs, f"{count} at once")["schedule"]) == count


@pytest.mark.parametrize("name", ["preemptions", "preemptions on used blocks"])
def test_requests_were_really_preempted_and_resumed(pairs: Pairs, name: str) -> None:
    served = _on(pairs, name)
    assert served["num_preemptions"] > 0
    assert [len(answer["token_ids"]) for answer in served["answers"]] == [30] * 8


def test_blocks_were_really_evicted_and_computed_again(pairs: Pairs) -> None:
    cached = [answer["num_cached_tokens"] for answer in _on(pairs, "evictions")["answers"]]
    first_time, second_time = cached[:3], cached[3:]
    assert first_time == [0, 0, 0]
    # Without evictions all but the last block of every prompt would be hit.
    assert min(second_time) < 9 * BLOCK_SIZE


def test_a_prompt_gets_the_same_tokens_alone_and_in_a_crowd(pairs: Pairs) -> None:
    (alone,) = _on(pairs, "1 at once")["answers"]
    for count in (2, 3, 8, 32):
        first, *others = _on(pairs, f"{count} at once")["answers"]
        assert first["token_ids"] == alone["token_ids"]
        assert others[0]["token_ids"] != alone["token_ids"]


def test_the_override_is_what_both_runs_use(pairs: Pairs) -> None:
    assert pairs["scarce"].on.num_gpu_blocks == pairs["scarce"].off.num_gpu_blocks == SMALL_POOL_BLOCKS
    for report in pairs["scarce"].report:
        assert report["num_blocks"] == SMALL_POOL_BLOCKS
        assert report["allocated_bytes"] <= report["available_bytes"]


def test_every_layer_is_moved_in_steps_with_history_only(pairs: Pairs) -> None:
    for pool in POOLS:
        for report in pairs[pool].report:
            counters = report["counters"]
            assert 0 < counters["steps_with_history"] < counters["steps"]
            assert counters["transfers"] == counters["steps_with_history"] * NUM_LAYERS
