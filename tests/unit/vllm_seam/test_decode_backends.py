import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_kvpp.vllm_seam.decode_backends import (
    DECLARATION,
    DECODE_BACKENDS,
    find_in_place_obstacle,
    find_obstacle,
    list_able_backends,
)


def read_classes():
    """Every class in the modules of vLLM's MLA backends, by name; their sources, because most need a device."""
    (folder,) = find_spec("vllm.v1.attention.backends.mla").submodule_search_locations
    nodes = (node for path in sorted(Path(folder).glob("*.py")) for node in ast.walk(ast.parse(path.read_text())))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def find_returned(node, method, classes):
    """The constant that a class's method returns, its own or that of a base; None if there is none."""
    for function in (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == method):
        (returned,) = (statement for statement in ast.walk(function) if isinstance(statement, ast.Return))
        return returned.value.value if isinstance(returned.value, ast.Constant) else None
    bases = (classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes)
    return next((found for base in bases if (found := find_returned(base, method, classes)) is not None), None)


def is_common_backend(node, classes):
    """Whether vLLM's base of backends that attend an MLA cache is among a class's bases."""
    names = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return "MLACommonBackend" in names or any(
        is_common_backend(classes[name], classes) for name in names if name in classes
    )


def list_names_in_vllm():
    """The names of the backends that attend an MLA cache."""
    classes = read_classes()
    attending = [
        node
        for node in classes.values()
        if is_common_backend(node, classes) or find_returned(node, "is_mla", classes) is True
    ]
    return {name for node in attending if (name := find_returned(node, "get_name", classes)) is not None}


def test_every_backend_of_the_installed_vllm_that_attends_an_mla_cache_is_listed():
    assert list_names_in_vllm() - {backend.name for backend in DECODE_BACKENDS} == set()


def test_a_listed_backend_that_the_installed_vllm_lacks_says_from_which_release_it_is():
    missing = [backend for backend in DECODE_BACKENDS if backend.name not in list_names_in_vllm()]

    assert all("from vLLM 0." in backend.head_count for backend in missing)


def test_the_list_in_vllm_holds_those_that_are_known_to_be_there():
    assert {"CPU_MLA", "TRITON_MLA", "FLASHMLA", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE"} <= list_names_in_vllm()


def test_no_backend_is_listed_twice():
    assert len({backend.name for backend in DECODE_BACKENDS}) == len(DECODE_BACKENDS)


def test_a_backend_that_has_not_been_looked_at_is_not_taken_for_able():
    assert all(backend.obstacle for backend in DECODE_BACKENDS if "not looked at" in backend.head_count)


def test_those_that_take_the_heads_from_the_query_are_able():
    assert list_able_backends() == ("CPU_MLA", "TRITON_MLA")


def obstacle(attentions, *, prefill_context_parallel_size=1, on_cpu=True):
    return find_obstacle(attentions, prefill_context_parallel_size=prefill_context_parallel_size, on_cpu=on_cpu)


@pytest.mark.parametrize("backend", list_able_backends())
def test_an_able_backend_has_no_obstacle_on_cpu(attention_class, backend):
    assert obstacle([attention_class(backend=backend), attention_class(backend=backend)]) is None


def test_a_backend_that_plans_for_one_ranks_heads_is_named_with_its_reason(attention_class):
    assert obstacle([attention_class(backend="FLASHMLA")]) == (
        "attention backend FLASHMLA: its tiles are scheduled for one rank's heads"
    )


def test_triton_has_an_obstacle_on_devices_only(attention_class):
    assert "its workspace is reserved for one rank's heads" in obstacle(
        [attention_class(backend="TRITON_MLA")], on_cpu=False
    )


def test_a_backend_from_elsewhere_is_not_known(attention_class):
    assert obstacle([attention_class(backend="OTHERS_MLA")]) == "attention backend OTHERS_MLA: KVPP does not know it"


@pytest.mark.parametrize("backend", ["OTHERS_MLA", "FLASHMLA"])
def test_a_backend_that_declares_to_attend_all_heads_is_believed(attention_class, backend):
    attention = attention_class(backend=backend)
    setattr(attention.impl, DECLARATION, True)

    assert obstacle([attention]) is None


def test_one_layer_with_an_unable_backend_is_enough(attention_class):
    assert "AMX_MLA" in obstacle([attention_class(), attention_class(backend="AMX_MLA")])


def test_a_layer_with_a_forward_of_its_own_attends_in_a_way_of_its_own(attention_class, fused_attention_class):
    assert obstacle([attention_class(), fused_attention_class()]) == "FusedAttention attends in a way of its own"


def test_a_stage_without_attention_has_nothing_to_attend():
    assert obstacle([]) == "this stage has no attention layer"


def test_layers_with_different_heads_are_not_exchanged(attention_class):
    assert obstacle([attention_class(), attention_class(num_heads=4)]) == "its layers have different heads"


def test_ranks_of_prefill_context_parallelism_have_different_tokens(attention_class):
    found = obstacle([attention_class()], prefill_context_parallel_size=2)

    assert found == "ranks of prefill context parallelism have different tokens"


def in_place_obstacle(attentions, *, prefill_context_parallel_size=1, shares_memory=True, on_cpu=True):
    return find_in_place_obstacle(
        attentions,
        prefill_context_parallel_size=prefill_context_parallel_size,
        shares_memory=shares_memory,
        on_cpu=on_cpu,
    )


def test_only_backends_that_have_been_run_so_read_in_place():
    assert [backend.name for backend in DECODE_BACKENDS if backend.reads_in_place] == ["CPU_MLA"]


def test_a_backend_that_reads_in_place_has_no_obstacle_where_memory_is_shared(attention_class):
    # Each rank attends its own heads, so how many others have does not matter.
    assert in_place_obstacle([attention_class(), attention_class(num_heads=4)]) is None
    assert in_place_obstacle([attention_class()], shares_memory=False) == "the ranks do not share memory"
    assert in_place_obstacle([attention_class()], shares_memory=False, on_cpu=False) == (
        "the ranks do not share memory, which only ranks on CPUs do"
    )


@pytest.mark.parametrize("backend", ["TRITON_MLA", "OTHERS_MLA"])
def test_one_backend_that_has_not_been_run_on_anothers_memory_is_enough(attention_class, backend):
    attention = attention_class(backend=backend)
    setattr(attention.impl, DECLARATION, True)

    assert in_place_obstacle([attention_class(), attention]) == (
        f"attention backend {backend}: nobody has run it on another rank's memory yet"
    )


def test_what_stands_in_the_way_of_both_ways_does_so_in_place(attention_class, fused_attention_class):
    assert in_place_obstacle([fused_attention_class()]) == "FusedAttention attends in a way of its own"
    assert in_place_obstacle([]) == "this stage has no attention layer"
    assert in_place_obstacle([attention_class()], prefill_context_parallel_size=2) == (
        "ranks of prefill context parallelism have different tokens"
    )
