"""Collect which tests carry the name of which row of docs/support-matrix.md."""

import contextlib
import io
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests/engine", "tests/contracts", "tests/unit/plan", "tests/unit/vllm_seam")


class _Collector:
    def __init__(self) -> None:
        self.proofs: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for node, mark in item.iter_markers_with_node("proves"):
                for name in mark.args:
                    self.proofs[name].add(_shorten(node.nodeid))


def _shorten(node_id: str) -> str:
    """A named case of a file, or else the test; a marked class stands for its tests."""
    test, _, case = node_id.removesuffix("]").partition("[")
    file = test.partition("::")[0]
    return f"{file} [{case}]" if " " in case or case.isalpha() else test


def collect_proofs() -> dict[str, list[str]]:
    """Row names to the tests that carry them, by file and function.

    Raises:
        RuntimeError: the tests cannot be collected.
    """
    collector = _Collector()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(
            ["--collect-only", "-q", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
            + [str(ROOT / folder) for folder in FOLDERS],
            plugins=[collector],
        )
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"the tests cannot be collected:\n{said.getvalue()[-3000:]}")
    return {name: sorted(tests) for name, tests in collector.proofs.items()}
