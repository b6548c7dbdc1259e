import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_kvpp.planner.document import make_document

CASES = st.fixed_dictionaries(
    {
        "tp_size": st.sampled_from([2, 4, 8]),
        "pp_size": st.sampled_from([1, 2, 3]),
        "kv_memory": st.integers(200, 80_000).map(lambda mib: f"{mib}MiB"),
        "block_size": st.sampled_from([1, 16, 64]),
        "context": st.integers(1, 200_000),
        "num_requests": st.integers(1, 64),
        "transfer": st.sampled_from(["auto", "active", "full"]),
        "gpu": st.sampled_from([None, "h200", "910b"]),
    }
)


@given(model=st.sampled_from(["deepseek-v3", "glm-5.2", "deepseek-v2-lite"]), options=CASES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_document_and_the_tables_say_the_same(model, options, plan, render):
    found = plan(model, **options)
    document, text = json.loads(json.dumps(make_document(found))), render(found)

    for column in ("with_kvpp", "without_kvpp", "with_dcp"):
        for number in (document[column] or {}).values():
            assert number >= 0
            assert f" {number:,} " in text
    assert f" {document['factor']:.2f} " in text
    for stage in document["stages"]:
        for rank in stage["ranks"]:
            assert f" {rank['bytes_per_block']['total']:,} │" in text
            assert f" {rank['num_blocks']:,} │" in text
    for step in document["steps"]:
        assert f" {step['moved_bytes'] / 1e6:,.1f} MB " in text
    for verdict in document["verdicts"]:
        assert verdict in text.replace("\n", " ") or len(verdict) > 190


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gpu": "h200"}, "hidden but for the first layer"),
        ({"gpu": "h200", "num_requests": 32}, "exposed by"),
        ({"kv_memory": "9GiB"}, "the time is unknown; give --link"),
        ({"kv_memory": "9GiB", "link": "40"}, "ms on the link; give --gpu"),
        ({"kv_memory": "9GiB", "context": 10**8}, "No request of 100,000,000 tokens fits"),
        ({"kv_memory": "9GiB"}, "DCP 8 would hold 1.3"),
    ],
)
def test_the_verdict_is_a_sentence(options, expected, plan, render):
    assert expected in render(plan("deepseek-v3", **options))


def test_a_loss_is_called_one(plan, render, config_path):
    path = config_path(num_hidden_layers=2)

    assert "KVPP does not pay here: it holds 0.67 times" in render(
        plan(path, tp_size=2, kv_memory="8GiB", transfer="full")
    )


def test_an_estimate_says_so_and_a_given_memory_too(plan, render):
    assert "(estimate: 92% of 139.8 GiB, less" in render(plan("deepseek-v3", gpu="h200"))
    assert "40.00 GiB, as given" in render(plan("deepseek-v3", kv_memory="40GiB"))


def test_stages_and_groups_are_shown(plan, render):
    text = render(plan("deepseek-v3", kv_memory="40GiB", tp_size=4, pcp_size=2, pp_size=2, pp_partition="30,31"))

    assert "tp 4 × pcp 2, pp 2 (30 + 31 layers)" in text
    assert "What each rank of stage 1 keeps" in text
