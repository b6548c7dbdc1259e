import pytest

from vllm_kvpp import errors
from vllm_kvpp.errors import KVPPConfigError, KVPPError

ALL_ERRORS = [
    value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__
]


def test_a_configuration_error_shows_every_reason_on_a_line_of_its_own():
    error = KVPPConfigError(["first is 1; use 2", "second is 3; use 4"])

    assert str(error).splitlines() == [
        "KVPP cannot run with this configuration:",
        "  - first is 1; use 2",
        "  - second is 3; use 4",
    ]


def test_a_configuration_error_keeps_its_reasons_apart():
    assert KVPPConfigError(reason for reason in ("one", "two")).reasons == ("one", "two")


@pytest.mark.parametrize("error", ALL_ERRORS)
def test_every_error_can_be_caught_as_one_of_ours(error):
    assert issubclass(error, KVPPError)


@pytest.mark.parametrize("error", ALL_ERRORS)
def test_no_error_is_one_that_pydantic_folds_into_its_own_report(error):
    assert not issubclass(error, (ValueError, AssertionError))


@pytest.mark.parametrize("error", ALL_ERRORS)
def test_the_drawn_tree_names_every_error(error):
    assert error.__name__ in errors.__doc__
