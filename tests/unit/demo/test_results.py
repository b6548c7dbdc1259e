import pytest

from vllm_kvpp.demo.errors import DemoError
from vllm_kvpp.demo.results import RankReport, parse_report

REPORT = {
    "group_rank": 1,
    "num_target_layers": 8,
    "num_blocks": 30,
    "other": "ignored",
    "counters": {
        "steps": 5,
        "steps_with_history": 3,
        "steps_with_transfers": 1,
        "transfers": 8,
        "transferred_bytes": 9,
        "steps_at_owner": 2,
        "exchanges": 16,
        "query_bytes": 30,
        "output_bytes": 20,
        "steps_in_place": 4,
        "host_wait_seconds": 0.1,
    },
}


def test_a_report_is_read():
    report = parse_report(REPORT)
    assert report == RankReport(
        *(1, 8, 30),
        steps=5,
        steps_with_history=3,
        steps_with_transfers=1,
        transfers=8,
        transferred_bytes=9,
        steps_at_owner=2,
        exchanges=16,
        exchanged_bytes=50,
        steps_in_place=4,
    )
    assert report.steps_without_history == 2
    assert report.moved_bytes == 59


@pytest.mark.parametrize("report", [None, {}, {**REPORT, "counters": {}}, {**REPORT, "counters": None}])
def test_a_report_without_its_numbers_is_an_error(report):
    with pytest.raises(DemoError, match="unexpected form"):
        parse_report(report)


def test_factor_and_accuracy_follow_from_the_numbers(result):
    assert result.factor == result.expected_factor == 1210 / 910
    assert (result.accuracy(result.off.answers), result.accuracy(result.on.broken_answers)) == (1.0, 0.0)
