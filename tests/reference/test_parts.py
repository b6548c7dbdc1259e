import subprocess
import sys
from pathlib import Path

import pytest
from mla_cpu_reference.parts import PARTS, UnknownPartError, describe_table, selected_parts


def test_parts_are_selected_by_name_in_the_order_of_the_table() -> None:
    names = [part.name for part in PARTS]
    assert [part.name for part in selected_parts(" , ".join(reversed(names)))] == names


def test_nothing_is_selected_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_CPU_REFERENCE", raising=False)
    assert selected_parts() == ()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownPartError, match=r"names chunkd; the parts are .*chunked_prefill"):
        selected_parts("chunked_prefill,chunkd")


def test_the_table_has_a_row_for_each_part() -> None:
    assert len(describe_table().splitlines()) == len(PARTS) + 2


def test_the_plugin_changes_nothing_without_a_name() -> None:
    code = (
        "import sys; from mla_cpu_reference.plugin import register; register(); "
        "print([name for name in sys.modules if name.startswith('vllm')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin"}, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_readme_has_the_table() -> None:
    assert describe_table() in (Path(__file__).parents[2] / "reference/README.md").read_text()
