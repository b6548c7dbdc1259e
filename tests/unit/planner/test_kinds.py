import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_kvpp.planner.errors import PlannerError
from vllm_kvpp.planner.kinds import MLA_TYPES


def read_function_of_vllm(path, name):
    spec = find_spec("vllm")
    assert spec is not None
    source = (Path(spec.submodule_search_locations[0]) / path).read_text()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return next(node for node in functions if node.name == name)


def test_every_type_that_is_planned_is_one_that_vllm_runs_with_mla():
    rule = read_function_of_vllm("transformers_utils/model_arch_config_convertor.py", "is_deepseek_mla")
    named = {node.value for node in ast.walk(rule) if isinstance(node, ast.Constant) and isinstance(node.value, str)}

    assert named >= MLA_TYPES


@pytest.mark.parametrize(
    "changes",
    [
        {"compress_ratios": [0, 4]},
        {"linear_attn_config": {"full_attn_layers": [4]}},
        {"full_attention_interval": 4},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"sliding_window": 128},
    ],
)
def test_a_hybrid_model_is_refused_by_what_is_in_its_configuration(changes, model):
    with pytest.raises(PlannerError, match=f"small, DeepseekV3ForCausalLM, is hybrid: .*{next(iter(changes))}"):
        model(**changes)


@pytest.mark.parametrize("changes", [{"layer_types": ["full_attention"] * 8}, {"sliding_window": 0}])
def test_a_model_whose_layers_are_all_alike_is_not_hybrid(changes, model):
    assert model(**changes).num_layers == 8


def test_a_model_without_a_latent_is_refused(model):
    with pytest.raises(PlannerError, match="has no kv_lora_rank, so no latent cache"):
        model(kv_lora_rank=None)


def test_a_model_with_a_latent_that_vllm_does_not_cache_is_refused(model):
    with pytest.raises(PlannerError, match="model_type minicpm3"):
        model(model_type="minicpm3")


def test_a_configuration_without_a_type_is_refused(model):
    with pytest.raises(PlannerError, match="has no model_type"):
        model(model_type=None)
