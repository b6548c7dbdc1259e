import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpp.planner.traffic import _expose_stage

SECONDS = st.floats(1e-9, 1e3)


@pytest.fixture
def steps(plan):
    return lambda **options: plan("deepseek-v3", **{"gpu": "h200", **options}).steps


def test_active_blocks_follow_the_requests_and_whole_layers_the_memory(steps):
    decode, chunk = steps(context=1000, num_requests=3)
    bytes_of_a_block = 61 * 1152 * 64

    assert decode.active_bytes == 3 * 16 * bytes_of_a_block
    assert chunk.active_bytes == 16 * bytes_of_a_block
    assert decode.whole_bytes == chunk.whole_bytes > 1000 * decode.active_bytes


@pytest.mark.parametrize(("transfer", "way"), [("auto", "active"), ("active", "active"), ("full", "whole")])
def test_the_mode_chooses_what_is_moved(transfer, way, steps):
    decode = steps(transfer=transfer)[0]

    assert decode.moved_bytes == getattr(decode, f"{way}_bytes")


def test_a_link_by_number_is_taken_as_reached_and_one_by_name_for_80_percent(steps):
    measured, named = steps(link="450")[0], steps(link="nvlink-h100")[0]

    assert measured.transfer_seconds == pytest.approx(measured.moved_bytes / 450e9)
    assert named.transfer_seconds == pytest.approx(measured.transfer_seconds / 0.8)


def test_stages_run_one_after_another_and_each_exposes_its_first_layer(steps):
    one, two = steps(tp_size=8)[0], steps(tp_size=8, pp_size=2)[0]

    assert two.transfer_seconds == pytest.approx(one.transfer_seconds)
    assert two.exposure.first_layer == pytest.approx(2 * one.exposure.first_layer)


def test_a_prefill_hides_what_a_decode_step_exposes(steps):
    decode, chunk = steps(context=16_384, num_requests=32)

    assert not decode.exposure.is_hidden
    assert chunk.exposure.is_hidden
    assert chunk.exposure.exposed == chunk.exposure.first_layer > 0


def test_no_more_requests_run_than_fit(steps):
    decode = steps(kv_memory="10GiB", context=100_000, num_requests=1000)[0]

    assert decode.step.num_requests < 100
    assert decode.active_bytes <= decode.whole_bytes


def test_without_a_device_the_time_on_the_link_is_known_and_what_compute_hides_is_not(plan):
    decode = plan("deepseek-v3", kv_memory="40GiB", link="50").steps[0]

    assert decode.transfer_seconds > 0
    assert decode.exposure is None


def test_a_request_that_does_not_fit_moves_nothing(steps):
    assert steps(kv_memory="1GiB", context=10**8) == ()


@given(layers=st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=20))
def test_what_is_exposed_lies_between_the_first_layer_and_the_whole_transfer(layers):
    transfers, computes = ([pair[index] for pair in layers] for index in (0, 1))
    exposure = _expose_stage(transfers, computes)

    assert transfers[0] <= exposure.exposed <= sum(transfers) * (1 + 1e-9)
    assert exposure.exposed + exposure.compute >= exposure.transfer * (1 - 1e-9)


def test_a_layer_hides_behind_the_one_before_and_behind_no_other():
    exposure = _expose_stage([1.0, 5.0, 1.0], [2.0, 10.0, 10.0])

    assert exposure.exposed == 1.0 + 3.0
    assert not exposure.is_hidden
