"""What all tests share: the marker by which a test proves a row of docs/support-matrix.md."""

import pytest
from support_matrix import FEATURES

_NAMES = {feature.name for feature in FEATURES}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("proves"):
            if unknown := set(mark.args) - _NAMES:
                raise pytest.UsageError(
                    f"{item.nodeid} proves {sorted(unknown)}, which are no rows of tests/matrix/support_matrix.py"
                )
