import ast
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.parallel import _split_evenly, split_model


@pytest.fixture(scope="module")
def split_by_vllm():
    """vLLM's own function, taken out of its source, as an import of it takes seconds."""
    path = Path(find_spec("vllm").submodule_search_locations[0]) / "distributed/utils.py"
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_pp_indices"]
    scope = {
        "envs": types.SimpleNamespace(VLLM_PP_LAYER_PARTITION=None),
        "logger": types.SimpleNamespace(info=lambda *_: None),
    }
    exec(compile(tree, path, "exec"), scope)
    return scope["get_pp_indices"]


@given(num_layers=st.integers(1, 200), pp_size=st.integers(1, 32))
def test_layers_are_split_as_vllm_splits_them(num_layers, pp_size, split_by_vllm):
    if pp_size > num_layers:
        return
    bounds = [split_by_vllm(num_layers, rank, pp_size) for rank in range(pp_size)]

    assert _split_evenly(num_layers, pp_size) == tuple(end - start for start, end in bounds)


def split(model, **options):
    return split_model(model, **{"tp_size": 2, "pcp_size": 1, "pp_size": 1, "partition": None, **options})


def test_the_group_is_tp_times_pcp_and_stages_multiply_the_ranks(model):
    parallelism = split(model(), pcp_size=2, pp_size=2)

    assert (parallelism.group_size, parallelism.num_ranks, parallelism.partition) == (4, 8, (4, 4))


def test_a_partition_can_be_uneven(model):
    assert split(model(), pp_size=2, partition="3, 5").partition == (3, 5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tp_size": 3}, "--tp is 3, which does not divide the 16 attention heads of small; use 2, 4, 8, 16"),
        ({"tp_size": 16}, "group of 16 ranks, but the smallest stage has 8 layers.*--tp 8 or less"),
        ({"tp_size": 8, "pcp_size": 2}, "--tp 8 and --pcp 2 make a group of 16 ranks.*--tp 4 or less"),
        ({"tp_size": 8, "pp_size": 2}, "smallest stage has 4 layers.*fewer stages"),
        ({"tp_size": 1}, "use --tp 2 or more"),
        ({"pp_size": 9}, "--pp is 9, but small has 8 layers"),
        ({"pp_size": 2, "partition": "4,x"}, "--pp-partition is '4,x'"),
        ({"pp_size": 2, "partition": "8,0"}, "--pp-partition is '8,0'"),
        ({"pp_size": 2, "partition": ""}, "--pp-partition is ''"),
        ({"pp_size": 2, "partition": "8"}, "names 1 stages, but --pp is 2"),
        ({"pp_size": 2, "partition": "4,5"}, "9 layers together, but small has 8"),
    ],
)
def test_a_split_that_cannot_be_says_what_would_do(options, expected, model):
    with pytest.raises(PlannerError, match=expected):
        split(model(), **options)
