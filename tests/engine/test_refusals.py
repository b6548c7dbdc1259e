"""Every configuration that KVPP refuses, through the argument path of `vllm serve`, before any weight is loaded."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_config
from engine_process import HERE, NATIVE_ROPE, engine_environment, run_process

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KVPP = {"enable_kvpp": True}


@dataclass(frozen=True)
class Case:
    """A command line and the sentences that its refusal must hold; without sentences it must be accepted."""

    name: str
    sentences: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    additional_config: Any = field(default_factory=lambda: KVPP)
    tensor_parallel_size: int = 2
    is_eager: bool = True
    pretend_graphs: bool = False
    model: str = "mla"


def _json(**values: Any) -> str:
    return json.dumps(values)


CASES = (
    Case("good"),
    Case("good with switch as text", additional_config={"enable_kvpp": "True"}),
    Case("good piecewise", (), ("--compilation-config", _json(cudagraph_mode="PIECEWISE")), KVPP, 2, False, True),
    Case(
        "switch is no boolean", ("enable_kvpp is 'maybe'", "true or false"), additional_config={"enable_kvpp": "maybe"}
    ),
    Case("switch is null", ("enable_kvpp is None",), additional_config={"enable_kvpp": None}),
    Case(
        "unknown option",
        ("kvpp.transfr is not an option", "transfer_timeout_seconds"),
        additional_config={**KVPP, "kvpp": {"transfr": "full"}},
    ),
    Case(
        "DCP",
        ("KVPP and DCP cannot be enabled at the same time.", "decode_context_parallel_size is 2; set it to 1"),
        ("--decode-context-parallel-size", "2"),
    ),
    Case(
        "decode-only node",
        ("KVPP must be disabled on the decode-only node.", "kv_role is kv_consumer"),
        ("--kv-transfer-config", _json(kv_connector="MooncakeConnectorV2", kv_role="kv_consumer")),
    ),
    Case(
        "other connector",
        ("with MooncakeConnectorV2 only", "kv_connector is NixlConnector"),
        ("--kv-transfer-config", _json(kv_connector="NixlConnector", kv_role="kv_both")),
    ),
    Case(
        "prefill connector that is not proven",
        ("not proven yet", "remove --kv-transfer-config"),
        ("--kv-transfer-config", _json(kv_connector="MooncakeConnectorV2", kv_role="kv_producer")),
    ),
    Case(
        "default graphs",
        ("KVPP supports eager execution or PIECEWISE only.", "add --enforce-eager"),
        is_eager=False,
        pretend_graphs=True,
    ),
    Case(
        "full graphs",
        ("KVPP supports eager execution or PIECEWISE only.", "cudagraph_mode is FULL;"),
        ("--compilation-config", _json(cudagraph_mode="FULL")),
        is_eager=False,
        pretend_graphs=True,
    ),
    Case(
        "cache update inside the graphs",
        ("splitting_ops lacks vllm::unified_mla_kv_cache_update",),
        ("--compilation-config", _json(cudagraph_mode="PIECEWISE", use_inductor_graph_partition=True)),
        is_eager=False,
        pretend_graphs=True,
    ),
    Case(
        "offloading",
        ("does not support offloading", "remove --kv-offloading-size"),
        ("--kv-offloading-size", "1"),
    ),
    Case("not MLA", ("only non-hybrid MLA models.", "LlamaForCausalLM does not use MLA"), model="llama"),
    Case("hybrid", ("only non-hybrid MLA models.", "is hybrid"), model="hybrid"),
    Case(
        "sparse and compiled",
        ("sparse attention in eager execution only", "has an attention indexer; add --enforce-eager"),
        ("--compilation-config", _json(mode=3, cudagraph_mode="PIECEWISE")),
        model="sparse",
        is_eager=False,
        pretend_graphs=True,
    ),
    Case("good sparse", model="sparse"),
    Case(
        "ngram drafts",
        ("with mtp or dspark only", "method is ngram", "remove --speculative-config"),
        ("--speculative-config", _json(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)),
    ),
    Case(
        "several at once",
        ("KVPP and DCP", "with mtp or dspark only"),
        (
            *("--decode-context-parallel-size", "2", "--speculative-config"),
            _json(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3),
        ),
    ),
    Case("one rank", tensor_parallel_size=1),
    Case("off with everything wrong", (), ("--decode-context-parallel-size", "2"), {"enable_kvpp": False}),
)


def _llama() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("mla", "llama", "hybrid", "sparse")}
    write_config(folders["mla"])
    (folders["llama"] / "config.json").write_text(json.dumps(_llama()))
    linear = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
    write_config(
        folders["hybrid"],
        architectures=["KimiLinearForCausalLM"],
        model_type="kimi_linear",
        linear_attn_config=linear,
        head_dim=80,
    )
    write_config(
        folders["sparse"],
        architectures=["DeepseekV32ForCausalLM"],
        model_type="deepseek_v32",
        q_lora_rank=64,
        index_n_heads=4,
        index_head_dim=128,
        index_topk=32,
    )
    return folders


def _command_line(case: Case, models: dict[str, Path]) -> list[str]:
    return [
        str(models[case.model]),
        *("--tensor-parallel-size", str(case.tensor_parallel_size), "--skip-tokenizer-init"),
        *(["--enforce-eager"] if case.is_eager else []),
        *("--additional-config", json.dumps(case.additional_config)),
        *case.arguments,
    ]


@pytest.fixture(scope="module")
def outcomes(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("arguments")
    lines = [{"arguments": _command_line(case, models), "pretend_graphs": case.pretend_graphs} for case in CASES]
    (folder / "in.json").write_text(json.dumps(lines))
    command = [sys.executable, str(HERE / "serve_arguments.py"), str(folder / "in.json"), str(folder / "out.json")]
    result = run_process(command, engine_environment(2, folder), folder / "log", 300)
    assert result.returncode == 0, result.output[-4000:]
    said = json.loads((folder / "out.json").read_text())
    return {case.name: {**outcome, "log": result.output} for case, outcome in zip(CASES, said, strict=True)}


@pytest.mark.parametrize("case", [case for case in CASES if case.sentences], ids=lambda case: case.name)
def test_the_configuration_is_refused_with_the_reason_and_the_remedy(
    case: Case, outcomes: dict[str, dict[str, Any]]
) -> None:
    outcome = outcomes[case.name]
    assert outcome["error"] == "KVPPConfigError", outcome["message"]
    assert outcome["message"].startswith("KVPP cannot run with this configuration:\n  - ")
    for sentence in case.sentences:
        assert sentence in outcome["message"]


@pytest.mark.parametrize("name", ["good", "good with switch as text", "good piecewise", "good sparse"])
def test_a_supported_configuration_gets_our_worker(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes[name]["error"] is None, outcomes[name]["message"]
    assert "KVPPWorker<vllm:v1:worker:cpu_worker:CPUWorker>" in outcomes[name]["worker_cls"]


@pytest.mark.parametrize("name", ["one rank", "off with everything wrong"])
def test_without_effect_or_switched_off_the_worker_stays_the_platforms(
    name: str, outcomes: dict[str, dict[str, Any]]
) -> None:
    assert outcomes[name]["error"] is None, outcomes[name]["message"]
    assert outcomes[name]["worker_cls"] == "vllm.v1.worker.cpu_worker.CPUWorker"


def test_a_group_of_one_rank_says_once_that_it_has_no_effect(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["one rank"]["log"].count("enable_kvpp has no effect: the KVPP group has 1 rank") == 1


def _serve(folder: Path, model: Path, *arguments: str, timeout_seconds: float = 180) -> Any:
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--load-format", "dummy"),
        *("--tensor-parallel-size", "2", "--enforce-eager", "--skip-tokenizer-init", "--dtype", "float32"),
        *("--attention-backend", "CPU_MLA"),
        *("--compilation-config", json.dumps(NATIVE_ROPE), *arguments),
    ]
    return run_process(command, engine_environment(2, folder), folder / "serve.log", timeout_seconds)


def test_vllm_serve_ends_with_the_reason_before_it_loads_anything(tmp_path: Path, models: dict[str, Path]) -> None:
    result = _serve(tmp_path, models["mla"], "--additional-config", '{"enable_kvpp": "maybe", "kvpp": {"x": 1}}')
    assert result.returncode != 0
    assert "enable_kvpp is 'maybe', which is not a boolean; use true or false." in result.output
    assert "kvpp.x is not an option" in result.output
    assert "Starting to load model" not in result.output
    assert result.leftovers == []


def test_a_budget_too_small_for_one_request_ends_with_what_a_block_costs(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    arguments = ("--kv-cache-memory-bytes", str(8 * 1024 * 1024), "--max-model-len", "1024")
    result = _serve(tmp_path, models["mla"], "--additional-config", json.dumps(KVPP), *arguments)
    assert result.returncode != 0
    assert "One request of max_model_len 1024 needs 65 blocks, but with KVPP" in result.output
    assert "for two scratch buffers" in result.output
    assert "lower max_model_len to" in result.output
    assert result.leftovers == []


def test_an_override_beyond_the_memory_is_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    arguments = (
        *("--kv-cache-memory-bytes", str(64 * 1024 * 1024), "--max-model-len", "512"),
        *("--num-gpu-blocks-override", "100000"),
    )
    result = _serve(tmp_path, models["mla"], "--additional-config", json.dumps(KVPP), *arguments)
    assert result.returncode != 0
    assert "num_gpu_blocks_override is 100000, but with KVPP" in result.output
    assert result.leftovers == []


def test_an_override_below_one_request_is_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    arguments = (
        *("--kv-cache-memory-bytes", str(64 * 1024 * 1024), "--max-model-len", "512"),
        *("--num-gpu-blocks-override", "20"),
    )
    result = _serve(tmp_path, models["mla"], "--additional-config", json.dumps(KVPP), *arguments)
    assert result.returncode != 0
    # By vLLM itself, which plans with the override.
    assert "max seq len (512)" in result.output
    assert result.leftovers == []
