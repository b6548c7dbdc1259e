"""What the documents say about the code."""

import re
from pathlib import Path

import pytest

import vllm_kvpp
from vllm_kvpp.config import KVPPOptions
from vllm_kvpp.vllm_seam.doctor_symbols import DOCTOR_SYMBOLS, describe_doctor_table
from vllm_kvpp.vllm_seam.symbols import SEAM, describe_table

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recall_model/*.md")])


def test_the_seam_table_lists_exactly_the_symbols_that_are_checked() -> None:
    page = (ROOT / "docs/vllm-seam.md").read_text()
    assert describe_table() in page, "paste the output of `make seam-table`"
    assert describe_doctor_table() in page, "paste the output of `make seam-table`"


def test_every_vllm_name_that_the_seam_imports_has_a_row() -> None:
    rows = {symbol.path.replace(":", ".") for symbol in (*SEAM, *DOCTOR_SYMBOLS)}
    for path in sorted((ROOT / "src/vllm_kvpp/vllm_seam").glob("*.py")):
        for module, names in re.findall(
            r"^\s*from (vllm(?:\.\w+)*) import (.+)$", path.read_text(), flags=re.MULTILINE
        ):
            for name in names.split(", "):
                assert any(f"{row}.".startswith(f"{module}.{name}.") for row in rows), f"{path.name}: {module}.{name}"


def test_the_readme_names_every_option() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "enable_kvpp" in readme
    for option in KVPPOptions.model_fields:
        assert option in readme


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in DOCUMENTS:
        for target in re.findall(r"\bmake ([a-z-]+)", document.read_text()):
            # Only what stands in code counts: "make sure" is English.
            if f"`make {target}`" in document.read_text() or f"\nmake {target}" in document.read_text():
                assert target in targets, f"{document.name} names `make {target}`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name} links {target}"


def test_the_changelog_has_the_version() -> None:
    assert f"## {vllm_kvpp.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_version_stands_in_one_place() -> None:
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
