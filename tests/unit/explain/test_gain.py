import json

import pytest

from vllm_kvpp.explain.errors import ExplainError


@pytest.fixture
def folder(tmp_path):
    """A small MLA model on this machine."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "hidden_size": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_the_plan_has_what_the_log_says(explained, write):
    log = write.gpu_log(pp=2, dtype="float16", kv_cache_dtype="fp8", length=8192)
    options = explained(log).gain.plan.options

    assert (options.model, options.tp_size, options.pp_size) == ("deepseek-ai/DeepSeek-V3", 8, 2)
    assert (options.dtype, options.kv_cache_dtype, options.context) == ("float16", "fp8", 8192)
    assert (options.kv_memory, options.transport, options.draft) == ("46.8gib", "broadcast", None)


def test_the_plan_finds_without_kvpp_what_the_log_has(explained, write):
    found = explained(write.gpu_log())

    assert found.gain.plan.capacity.num_blocks_without == found.blocks.num_blocks == 11_173
    assert round(found.gain.plan.capacity.factor, 2) == 6.09


def test_the_smallest_memory_of_the_ranks_is_planned_with(explained, write):
    memories = [write.cpu_memory(rank=rank, pid=rank, gib=gib) for rank, gib in enumerate((3, 2.5))]
    plan = explained([write.engine(device="cpu"), *memories, write.pool()]).gain.plan

    assert plan.options.kv_memory == "2.5gib"


def test_memory_that_was_given_in_bytes_is_exact(explained, write):
    log = [write.arguments(more=", 'kv_cache_memory_bytes': 50000000001"), *write.gpu_log()[1:]]

    assert explained(log).gain.plan.memories[0].available_bytes == 50_000_000_001


def test_a_model_on_this_machine_is_read(explained, write, folder):
    plan = explained(write.gpu_log(model=folder)).gain.plan

    assert plan.model.num_layers == 8


def test_a_model_of_the_catalogues_name_elsewhere_is_taken_for_it_and_said_so(explained, write):
    found = explained(write.gpu_log(model="/data/models/Kimi-K2.5"))

    assert found.gain.plan.model.name == "moonshotai/Kimi-K2.5"
    assert "taken for moonshotai/Kimi-K2.5 by its name" in found.notes[0]


def test_the_model_that_the_user_names_counts(explained, write, folder):
    assert explained(write.gpu_log(), model=folder).gain.plan.model.num_layers == 8


def test_a_model_that_the_user_names_and_is_none_is_refused_by_name(explained, write):
    with pytest.raises(ExplainError, match=r"^--model is 'no-model', which is neither"):
        explained(write.gpu_log(), model="no-model")


@pytest.mark.parametrize(
    ("device", "hints", "more", "expected"),
    [
        ("cuda", {}, "", 64),
        ("cpu", {}, "", 16),
        ("cuda", {}, ", 'block_size': 128", 128),
        ("cuda", {"block_size": 32}, ", 'block_size': 128", 32),
    ],
)
def test_the_block_size_is_said_or_assumed(device, hints, more, expected, explained, write):
    log = [write.arguments(more=more), *write.gpu_log(device=device)[1:]]
    found = explained(log, **hints)

    assert found.gain.plan.capacity.block_size == expected
    assert any("are assumed" in note for note in found.notes) is not bool(hints or more)


def test_drafts_of_the_model_are_planned_with(explained, write):
    log = write.gpu_log(draft="SpeculativeConfig(method='mtp', model='x', num_spec_tokens=1)")

    assert explained(log).gain.plan.options.draft == "mtp"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "somebody/unknown"}, "give it as --model CONFIG"),
        ({"tp": 1}, "so KVPP has no effect; use 2 or more"),
        ({"dcp": 2}, "decode_context_parallel_size is 2; set it to 1"),
        ({"draft": "SpeculativeConfig(method='ngram', num_spec_tokens=2)"}, "method is ngram"),
        ({"model": "deepseek-ai/DeepSeek-V4-Flash"}, "is hybrid"),
        ({"kv_cache_dtype": "int3"}, "--kv-cache-dtype is 'int3'"),
    ],
)
def test_what_cannot_be_planned_says_why(changes, expected, explained, write):
    gain = explained(write.gpu_log(**changes)).gain

    assert gain.plan is None
    assert expected in gain.refusal


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (lambda write: [write.pool()], "does not say the model"),
        (lambda write: [write.engine(), write.pool()], "does not say the KV cache memory"),
    ],
)
def test_what_the_log_lacks_is_named(lines, expected, explained, write):
    assert expected in explained(lines(write)).gain.refusal


def test_what_the_log_lacks_can_be_given(explained, write):
    log = [write.gpu_memory(gib=46.8), write.pool()]

    assert explained(log, model="deepseek-v3", tp_size=8).gain.plan.capacity.group_size == 8


def test_where_kvpp_is_on_nothing_is_planned(explained, write):
    assert explained([*write.gpu_log(), "KVPP is on: group size 8."]).gain is None
