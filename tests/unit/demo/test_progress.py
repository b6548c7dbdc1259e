import io

import pytest
from rich.console import Console

from vllm_kvpp.demo.progress import ProgressReporter


def run_stage(console):
    with ProgressReporter(console).stage("Starting [it]") as on_phase:
        for phase in ("loading", "loading", "serving"):
            on_phase(phase)


def test_without_a_terminal_each_phase_is_one_plain_line():
    out = io.StringIO()
    run_stage(Console(file=out, width=40))
    lines = out.getvalue().splitlines()
    assert [line.rsplit(" (", 1)[0] for line in lines] == [
        "Starting [it] …",
        "Starting [it]: loading",
        "Starting [it]: serving",
        "✓ Starting [it]",
    ]


def test_in_a_terminal_the_line_is_replaced_and_the_end_stays():
    out = io.StringIO()
    run_stage(Console(file=out, width=80, force_terminal=True, color_system=None))
    assert "Starting [it]: serving" in out.getvalue()
    assert out.getvalue().splitlines()[-1].endswith("✓ Starting [it] (0 s)")


@pytest.mark.parametrize("force_terminal", [True, False])
def test_a_stage_that_fails_is_not_reported_as_done(force_terminal):
    out = io.StringIO()
    reporter = ProgressReporter(Console(file=out, force_terminal=force_terminal))
    with pytest.raises(ZeroDivisionError), reporter.stage("Starting"):
        raise ZeroDivisionError
    assert "✓" not in out.getvalue()
