"""The benchmarks start, are listed, and divide what was measured in pairs. What they measure is no test's business."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMANDS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "typer.run(main)" in path.read_text())


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_there_is_a_command_for_each_question() -> None:
    assert COMMANDS == ["capacity_sessions.py", "context_sweep.py", "decode_sweep.py", "overhead.py", "pool_sweep.py"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_explains_itself_and_is_listed(command: str) -> None:
    told = subprocess.run(
        [sys.executable, str(BENCHMARKS / command), "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert told.returncode == 0, told.stderr
    assert "--json" in told.stdout
    assert f"benchmarks/{command}`" in (BENCHMARKS / "README.md").read_text()


def test_pairs_are_divided_before_anything_is_summarised() -> None:
    ratio = load("ratios").paired_ratios([2.0, 30.0, 3.0], [1.0, 10.0, 2.0])
    assert (ratio.median, ratio.lowest, ratio.highest, ratio.num_pairs) == (2.0, 1.5, 3.0, 3)
    assert str(ratio) == "2.00 (1.50–3.00, n=3)"


@pytest.mark.parametrize(("numerators", "denominators"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_pairs_that_are_none_are_refused(numerators: list[float], denominators: list[float]) -> None:
    with pytest.raises(ValueError, match=r"sides|positive"):
        load("ratios").paired_ratios(numerators, denominators)
