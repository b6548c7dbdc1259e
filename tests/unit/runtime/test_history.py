import pytest

from vllm_kvpp.runtime.history import Step


@pytest.mark.parametrize(
    "num_computed_tokens",
    [{"decode": 17}, {"later chunk": 16}, {"prefix hit": 1}, {"first prefill": 0, "decode": 40}],
)
def test_a_step_has_history_when_any_request_has_computed_tokens(num_computed_tokens):
    assert Step(num_computed_tokens).has_history


@pytest.mark.parametrize("num_computed_tokens", [{}, {"first prefill": 0}, {"one": 0, "other": 0}])
def test_a_step_of_first_prefills_has_no_history(num_computed_tokens):
    assert not Step(num_computed_tokens).has_history
