"""The documents on support and on faults say what the tests prove, and nothing else."""

import ast
import re
from collections import Counter
from pathlib import Path

import field_cases
import pytest
import support_matrix
from collect_proofs import collect_proofs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def proofs() -> dict[str, list[str]]:
    return collect_proofs()


@pytest.mark.parametrize("feature", support_matrix.FEATURES, ids=lambda feature: feature.name)
def test_every_row_is_carried_by_a_test_of_its_kind(
    proofs: dict[str, list[str]], feature: support_matrix.Feature
) -> None:
    folder = "tests/" if feature.proof == support_matrix.NOT_RUN else "tests/engine/"
    assert [test for test in proofs[feature.name] if test.startswith(folder)]


def test_the_support_matrix_is_what_the_tests_prove(proofs: dict[str, list[str]]) -> None:
    table = support_matrix.describe_table(proofs)
    assert table in (ROOT / "docs/support-matrix.md").read_text(), "run `make matrix`"


def test_no_row_stands_twice() -> None:
    counts = Counter(feature.name for feature in support_matrix.FEATURES)
    assert max(counts.values()) == 1


def test_the_table_of_faults_names_tests_that_exist() -> None:
    table = field_cases.describe_table(field_cases.find_places(ROOT / "tests"))
    assert table in (ROOT / "docs/field-cases.md").read_text(), "run `make matrix`"


def test_every_fault_has_a_test_or_says_why_it_needs_none() -> None:
    for case in field_cases.FIELD_CASES:
        assert case.because.endswith(".")
        assert case.tests or case.answer == field_cases.CANNOT_OCCUR, case.fault


def test_the_readme_links_both_documents() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"\]\(docs/support-matrix\.md\)", readme)
    assert re.search(r"\]\(docs/field-cases\.md\)", readme)


def test_no_engine_test_is_skipped_or_expected_to_fail() -> None:
    for path in sorted((ROOT / "tests/engine").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("skip", "skipif", "xfail", "importorskip"), f"{path.name}:{node.lineno}"
