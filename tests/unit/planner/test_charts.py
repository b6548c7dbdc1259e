from dataclasses import replace

import pytest

from vllm_kvpp.planner.charts import make_charts
from vllm_kvpp.planner.planning import PlanOptions, make_plan


@pytest.fixture
def charts(plan):
    """The charts of DeepSeek-V3 in 40 GiB, or as asked."""

    def make(model="deepseek-v3", **options):
        factor, tokens, seconds = make_charts(plan(model, **{"kv_memory": "40GiB", "link": "50", **options}))
        return {"factor": factor, "tokens": tokens, "time": seconds}

    return make


def _lines(chart):
    return {line.name: dict(line.points) for line in chart.lines}


def test_the_factor_of_every_group_size_is_that_of_a_plan_with_it(charts):
    factors = _lines(charts()["factor"])["KVPP"]

    assert list(factors) == list(range(2, 17))
    for size in (2, 4, 8, 16):
        found = make_plan(PlanOptions("deepseek-v3", tp_size=size, kv_memory="40GiB"))
        assert factors[size] == found.capacity.factor


def test_the_factor_counts_drafts_and_stages(charts, plan):
    options = {"pp_size": 2, "pp_partition": "30,31", "draft": "mtp", "kv_cache_dtype": "fp8"}
    found = plan("deepseek-v3", kv_memory="40GiB", **options)

    assert _lines(charts(**options)["factor"])["KVPP"][8] == found.capacity.factor


def test_no_group_is_larger_than_the_smallest_stage_has_layers(charts):
    assert max(_lines(charts(tp_size=4, pp_size=8)["factor"])["KVPP"]) == 7


def test_dcp_has_a_line_where_vllm_has_dcp_and_none_where_not(charts):
    dense, sparse = charts(), charts("glm-5.2")

    assert _lines(dense["factor"])["DCP"] == {size: size for size in range(2, 17)}
    assert "DCP" in _lines(dense["tokens"])
    assert "DCP" not in {*_lines(sparse["factor"]), *_lines(sparse["tokens"])}


def test_tokens_are_those_of_a_plan_with_that_many_ranks(charts, plan):
    lines = _lines(charts()["tokens"])

    assert list(lines["KVPP"]) == [2, 4, 8, 16]
    for size in lines["KVPP"]:
        found = plan("deepseek-v3", tp_size=size, kv_memory="40GiB")
        assert lines["KVPP"][size] == found.fit.num_tokens
        assert lines["without KVPP"][size] == found.fit_without.num_tokens
        assert lines["DCP"][size] == found.fit_with_dcp.num_tokens


def test_sizes_at_which_the_weights_do_not_fit_are_left_out(charts):
    found = charts(gpu="h200", kv_memory=None)["tokens"]

    assert list(_lines(found)["KVPP"]) == [8, 16]
    assert found.remark == "memory of each rank estimated for each size"


def test_times_are_those_of_a_plan_with_that_context(charts, plan):
    options = {"gpu": "h200", "num_requests": 3, "context": 5000}
    decode, prefill = (dict(line.points) for line in charts(**options)["time"].lines)

    assert list(decode) == list(prefill) == [1024, 2048, 4096, 5000, 8192, 16384, 32768, 65536, 131072]
    for context in (1024, 5000, 131072):
        steps = plan("deepseek-v3", kv_memory="40GiB", link="50", **{**options, "context": context}).steps
        assert decode[context] == steps[0].exposure.exposed * 1e3
        assert prefill[context] == steps[1].exposure.exposed * 1e3


def test_decode_that_reads_in_place_has_no_line_and_that_is_said(charts):
    chart = charts(transport="shared-memory")["time"]

    assert [line.name for line in chart.lines] == ["prefill chunk, 8,192 tokens"]
    assert chart.lines[0].points == charts()["time"].lines[1].points
    assert chart.remark.endswith("; decode reads in place")


def test_without_a_device_the_chart_has_the_time_on_the_link_and_says_so(charts, plan):
    chart = charts()["time"]
    (step, _) = plan("deepseek-v3", kv_memory="40GiB", link="50").steps

    assert dict(chart.lines[0].points)[32768] == step.transfer_seconds * 1e3
    assert "on the link" in chart.title
    assert "give --gpu" in chart.remark


def test_without_a_link_the_chart_of_times_is_empty_and_says_what_to_give(charts):
    chart = charts(link=None)["time"]

    assert chart.lines == ()
    assert "give --link" in chart.remark


def test_contexts_end_where_no_request_fits_or_the_model_does(charts):
    assert max(dict(charts(kv_memory="1GiB")["time"].lines[0].points)) == 65536
    assert max(dict(charts("deepseek-v3", context=100_000)["time"].lines[0].points)) == 131072


def test_what_was_asked_is_marked_on_every_line(charts):
    found = charts(tp_size=4, context=3000)
    asked = {name: {line.asked[0] for line in chart.lines} for name, chart in found.items()}

    assert asked == {"factor": {4}, "tokens": {4}, "time": {3000}}


def test_a_request_that_does_not_fit_is_marked_nowhere(charts):
    found = charts(kv_memory="1GiB", context=10**7)["time"]

    assert {line.asked for line in found.lines} == {None}


def test_a_chart_reads_no_configuration_anew(plan):
    found = plan("deepseek-v3", kv_memory="40GiB")
    elsewhere = replace(found, options=replace(found.options, model="no/such-model"))

    assert make_charts(elsewhere) == make_charts(found)
