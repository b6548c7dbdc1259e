import pytest

from vllm_kvpp.vllm_seam.doctor_symbols import DOCTOR_SYMBOLS, describe_doctor_table
from vllm_kvpp.vllm_seam.symbols import SEAM, find_faults


def test_the_installed_vllm_has_every_symbol_that_the_doctor_needs():
    assert find_faults(DOCTOR_SYMBOLS) == ()


def test_no_server_checks_what_only_the_doctor_needs():
    assert not set(DOCTOR_SYMBOLS) & set(SEAM)


@pytest.mark.parametrize("symbol", DOCTOR_SYMBOLS, ids=lambda symbol: symbol.path)
def test_every_symbol_says_why_it_is_touched_and_when_it_can_go(symbol):
    assert symbol.because.endswith(".")
    assert symbol.removable_when.endswith(".")


def test_the_table_has_one_row_for_each_symbol():
    rows = describe_doctor_table().splitlines()[2:]

    assert [row.split("`")[1] for row in rows] == [symbol.path for symbol in DOCTOR_SYMBOLS]
