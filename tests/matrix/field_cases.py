"""Faults that users met in features like ours, and what stands against each here: the rows of docs/field-cases.md.

`tests` are names of test functions anywhere below `tests/`; a contract test holds that each exists.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TEST = "test"
REFUSED = "refused"
CANNOT_OCCUR = "cannot occur"


@dataclass(frozen=True)
class FieldCase:
    """One fault: where users met it, what it was, and the answer."""

    source: str
    fault: str
    answer: str
    because: str
    tests: tuple[str, ...] = ()


def _github(path: str) -> str:
    return f"https://github.com/{path}"


FIELD_CASES: tuple[FieldCase, ...] = (
    FieldCase(
        _github("vllm-project/vllm-ascend/pull/16094"),
        "A prefetch thread blocks the host until each broadcast has ended",
        TEST,
        "On devices a wait orders streams by an event and calls nothing that blocks; recorded calls, no device yet. "
        "Without streams (CPU) the wait blocks, and counts its seconds.",
        ("test_waiting_orders_the_current_stream_and_nothing_else",),
    ),
    FieldCase(
        _github("vllm-project/vllm-ascend/pull/16094"),
        "Traffic grows with the pool and not with the work",
        TEST,
        "A step moves the blocks of its requests' history and no others, counted block by block on a real engine.",
        ("test_exactly_the_blocks_of_the_history_are_moved",),
    ),
    FieldCase(
        _github("vllm-project/vllm-ascend/pull/14913"),
        "The switch given as text in another case is not recognised",
        TEST,
        "Every spelling of a boolean has its meaning; anything else is refused by name.",
        (
            "test_every_spelling_of_true_turns_kvpp_on",
            "test_every_spelling_of_false_leaves_kvpp_off",
            "test_a_switch_that_is_no_boolean_is_refused_naming_setting_and_value",
        ),
    ),
    FieldCase(
        _github("vllm-project/vllm-ascend/pull/6610"),
        "The indexer's cache is priced as a second whole MLA page, and 39 % of the memory stays unused",
        TEST,
        "Each cache is priced by its own page, and the allocation equals the plan.",
        (
            "test_a_page_holds_the_bytes_that_the_spec_says",
            "test_glm_5_2_in_fp8_with_one_draft_layer_costs_54_728_bytes_a_token",
            "test_more_tokens_fit_within_the_same_memory",
        ),
    ),
    FieldCase(
        _github("sgl-project/sglang/pull/29421"),
        "The owner broadcasts on a communicator that does nothing, so readers see stale data",
        TEST,
        "Every rank sends a probe when the group is made, and one that does not arrive stops the start.",
        (
            "test_a_communicator_that_delivers_nothing_stops_the_start",
            "test_outputs_and_kept_caches_equal_the_reference_in_every_schedule",
            "test_without_transfers_every_rank_computes_wrong_outputs",
        ),
    ),
    FieldCase(
        _github("sgl-project/sglang/pull/30666"),
        "Servers that do not use the feature crash in it",
        TEST,
        "Switched off, the worker, its groups and its hooks are vLLM's own, and only the configuration hook is loaded. "
        "The runs without it include TP 4 and 8, PP 2 × TP 2 and DP 2 × TP 2.",
        (
            "test_with_kvpp_off_the_workers_are_vllms_own",
            "test_with_kvpp_off_only_the_configuration_hook_is_loaded",
        ),
    ),
    FieldCase(
        _github("ikawrakow/ik_llama.cpp/pull/2095"),
        "Layers without an indexer of their own turn dense in silence",
        TEST,
        "Layers that share an indexer reuse its choice whoever owns them; answers are equal, and change when only the "
        "indexer's cache is not moved.",
        (
            "test_schedules_and_answers_equal_those_of_a_run_without_kvpp_bit_for_bit",
            "test_answers_differ_under_each_fault",
        ),
    ),
    FieldCase(
        _github("vllm-project/vllm/issues/44376"),
        "The memory that one request needs is computed several times too big under a connector",
        TEST,
        "KVPP says what a request needs from its own plan; connectors are refused.",
        ("test_a_budget_too_small_for_one_request_ends_with_what_a_block_costs",),
    ),
    FieldCase(
        _github("vllm-project/vllm/issues/45425"),
        "MTP with DCP and default graphs cuts answers off",
        REFUSED,
        "DCP and full graphs are refused; MTP is compared with KVPP on and off.",
        (
            "test_the_configuration_is_refused_with_the_reason_and_the_remedy",
            "test_schedules_and_answers_equal_those_of_a_run_without_kvpp_bit_for_bit",
        ),
    ),
    FieldCase(
        _github("vllm-project/vllm/issues/41623"),
        "Answers drift under DCP",
        TEST,
        "Logprobs are equal to the bit for equal schedules, so nothing drifts; hours of load were not run.",
        ("test_schedules_and_answers_equal_those_of_a_run_without_kvpp_bit_for_bit",),
    ),
    FieldCase(
        _github("vllm-project/vllm/issues/28830"),
        "Nonsense when more than two requests run at once",
        TEST,
        "A prompt gets the same tokens alone and among 2, 3, 8 and 32.",
        ("test_a_prompt_gets_the_same_tokens_alone_and_in_a_crowd", "test_requests_really_ran_at_once"),
    ),
    FieldCase(
        _github("local-inference-lab/vllm/pull/679"),
        "Out of memory because the start-up profile skips the largest shape",
        TEST,
        "Everything KVPP allocates is inside the budget it plans with; whether the profile of a GPU is right "
        "has not been run.",
        ("test_everything_lies_inside_the_allocation_and_fills_it_to_its_end", "test_one_block_more_would_not_fit"),
    ),
    FieldCase(
        _github("local-inference-lab/rtx6kpro/issues/42"),
        "Memory allocated after profiling, outside the budget",
        TEST,
        "The communicator is made, and used once, before memory is profiled; nothing is allocated later.",
        ("test_every_rank_sends_a_probe_when_the_group_is_made",),
    ),
    FieldCase(
        _github("vllm-project/vllm-ascend/pull/4892"),
        "Owners from an even split, draft layers not counted, under a manual pipeline partition",
        TEST,
        "Each stage splits the layers that it really has; drafts are those that the drafter loaded.",
        (
            "test_each_stage_splits_its_own_layers",
            "test_uneven_stages_own_their_layers_once_each",
            "test_draft_layers_are_those_that_the_drafter_loaded",
        ),
    ),
    FieldCase(
        _github("vllm-project/vllm-ascend/pull/16219"),
        "A broadcast is queued before the stream that writes its source is waited for",
        TEST,
        "The transfer stream waits for an event of the compute stream first; recorded calls, no device yet.",
        (
            "test_a_transfer_is_ordered_after_the_compute_stream_and_the_collective",
            "test_a_wait_behind_the_write_is_noticed",
        ),
    ),
    FieldCase(
        _github("vllm-project/vllm/pull/48481"),
        "Zeroing of new blocks wipes what a transfer has just written",
        TEST,
        "No transfer starts before the model's forward, and zeroing is queued before it.",
        (
            "test_no_transfer_starts_before_the_model_runs",
            "test_a_new_request_gets_blocks_of_a_finished_one",
        ),
    ),
    FieldCase(
        _github("vllm-project/vllm/issues/43547"),
        "A replica without work skips a collective, and the other hangs",
        TEST,
        "KVPP's groups never cross replicas; one replica idles while the other works, in both orders.",
        (
            "test_answers_of_each_replica_equal_those_without_kvpp_bit_for_bit",
            "test_each_replica_moves_layers_in_its_own_steps_only",
            "test_a_replica_works_while_the_other_transfers_nothing",
        ),
    ),
    FieldCase(
        _github("NVIDIA/nccl/issues/783"),
        "Two communicators on two streams deadlock when ranks launch in different orders",
        TEST,
        "Every rank starts the same transfers in the same order, which follows from the scheduler's output and the "
        "plan alone; that NCCL makes progress with it has not been run.",
        ("test_ranks_of_uneven_speed_agree_with_the_reference", "test_all_ranks_count_the_same_transfers"),
    ),
    FieldCase(
        _github("ROCm/rccl/issues/2179"),
        "One communicator shared by several streams hangs",
        CANNOT_OCCUR,
        "Transfers have a communicator of their own, used from one stream.",
        (
            "test_with_kvpp_off_the_workers_are_vllms_own",
            "test_a_device_gets_a_transfer_stream_of_its_own",
        ),
    ),
    FieldCase(
        _github("sgl-project/sglang/issues/30760"),
        "Ranks call a collective a different number of times",
        TEST,
        "A layer out of order, or one that did not wait, raises in that very step on the rank where it happens.",
        (
            "test_a_layer_reached_before_its_turn_is_refused_naming_it_and_the_expected_one",
            "test_a_layer_that_did_not_wait_is_refused_at_the_end_of_the_step",
            "test_all_ranks_count_the_same_transfers",
        ),
    ),
    FieldCase(
        _github("NVIDIA/TensorRT-LLM/pull/14020"),
        "A rank-local count of free blocks sends ranks to different collectives",
        TEST,
        "All ranks compare plan and block count at the start, and take the smaller where memory differs.",
        (
            "test_the_rank_with_less_memory_decides_for_all",
            "test_each_stage_makes_a_group_that_works_and_notices_disagreement",
        ),
    ),
    FieldCase(
        _github("lightseekorg/tokenspeed/pull/1057"),
        "A rank without work of its own never completes, and all others wait",
        TEST,
        "A rank that owns no layer sends nothing, receives everything and starts and ends with the others.",
        (
            "test_outputs_and_kept_caches_equal_the_reference_for_every_shape_of_stage",
            "test_a_rank_that_owns_no_layer_pays_for_scratch_only",
        ),
    ),
    FieldCase(
        _github("vllm-project/vllm/pull/25164"),
        "Uneven ranks allocate for more blocks than are usable",
        TEST,
        "Every rank allocates for the count that the engine settled on, whatever it could hold; the start-up line "
        "names the bytes left unused.",
        (
            "test_the_rank_with_less_memory_decides_for_all",
            "test_61_layers_on_8_ranks_hold_6_times_the_tokens_in_vllms_own_log",
        ),
    ),
    FieldCase(
        _github("tenstorrent/tt-xla/pull/5731"),
        "The cache is split and the budget is not, so most of the memory stays unused",
        TEST,
        "vLLM's own block count and its check of what one request needs both see the cost of the split.",
        (
            "test_vllm_reports_exactly_the_blocks_of_the_plan",
            "test_vllm_fits_the_length_to_the_blocks_of_kvpp",
        ),
    ),
    FieldCase(
        _github("ai-dynamo/aiconfigurator/pull/912"),
        "A planner takes a nested MLA model for another kind",
        TEST,
        "The planner reads the language model's fields wherever they are nested; the runtime reads vLLM's cache specs "
        "and no model names.",
        ("test_a_nested_language_model_is_read_with_the_quantization_outside",),
    ),
    FieldCase(
        _github("vllm-project/vllm/pull/32614"),
        "A model is missing in a list of MLA models and takes four times the memory",
        CANNOT_OCCUR,
        "KVPP keeps no list of models: it asks vLLM whether the model uses MLA, and refuses it by name if not.",
        ("test_a_cache_of_another_kind_is_refused_by_kind",),
    ),
    FieldCase(
        _github("vllm-project/vllm/issues/15871"),
        "The refusal of a start does not say where the memory went",
        TEST,
        "It names owned layers, draft layers, scratch buffers and the bytes available.",
        (
            "test_a_budget_too_small_for_one_request_ends_with_what_a_block_costs",
            "test_a_refused_budget_says_what_a_block_costs",
        ),
    ),
    FieldCase(
        _github("vllm-project/vllm/issues/35541"),
        "With a block count by override below one request, requests hang",
        TEST,
        "vLLM refuses an override below one request, and KVPP one above what fits.",
        (
            "test_an_override_below_one_request_is_refused",
            "test_an_override_beyond_the_memory_is_refused",
        ),
    ),
)


def find_places(tests: Path) -> dict[str, list[str]]:
    """Map the names of all test functions below `tests` to the files that have one of that name.

    Raises:
        LookupError: a name that a case gives stands in no file.
    """
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(tests.glob("**/test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                places[node.name].append(str(path.relative_to(tests.parent)))
    for case in FIELD_CASES:
        for name in case.tests:
            if not places[name]:
                raise LookupError(f"{case.fault}: no test is called {name}")
    return dict(places)


def describe_table(places: Mapping[str, Sequence[str]], cases: Sequence[FieldCase] = FIELD_CASES) -> str:
    """The table of docs/field-cases.md, as Markdown; `places` maps names of test functions to their files."""
    rows = [
        f"| [{case.fault}]({case.source}) | {case.answer} | {case.because} | "
        f"{'<br>'.join(f'`{place}::{name}`' for name in case.tests for place in places[name])} |"
        for case in cases
    ]
    return "\n".join(("| What users met | Here | Because | Tests |", "|---|---|---|---|", *rows))
