import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_kvpp.cli import app
from vllm_kvpp.planner.config_file import ConfigFile
from vllm_kvpp.planner.model import read_model
from vllm_kvpp.planner.planning import PlanOptions, make_plan
from vllm_kvpp.planner.report import make_report

SMALL_MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch, tmp_path_factory):
    """No test asks a hub, or finds what somebody has fetched from one; `test_hub` has a hub of its own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))


@pytest.fixture
def config():
    """The fields of a small MLA model, with changes; None takes a field away."""

    def make(**changes):
        return {name: value for name, value in {**SMALL_MODEL, **changes}.items() if value is not None}

    return make


@pytest.fixture
def model(config):
    return lambda **changes: read_model(ConfigFile("small", config(**changes)))


@pytest.fixture
def config_path(config, tmp_path):
    """The small model's config.json, with changes, as a path."""

    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config(**changes)))
        return str(path)

    return write


@pytest.fixture
def plan():
    return lambda model, **options: make_plan(PlanOptions(model, **options))


@pytest.fixture
def render():
    def print_to_text(plan):
        console = Console(file=io.StringIO(), width=200, highlight=False)
        console.print(make_report(plan))
        return console.file.getvalue()

    return print_to_text


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, ["plan", *map(str, arguments)])
