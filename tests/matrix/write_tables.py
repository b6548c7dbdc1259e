"""Write the tables of docs/support-matrix.md and docs/field-cases.md anew."""

from pathlib import Path

import field_cases
import support_matrix
from collect_proofs import ROOT, collect_proofs


def _replace_table(document: Path, table: str) -> None:
    lines = document.read_text().splitlines()
    of_table = [index for index, line in enumerate(lines) if line.startswith("|")]
    lines[of_table[0] : of_table[-1] + 1] = table.splitlines()
    document.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    _replace_table(ROOT / "docs/support-matrix.md", support_matrix.describe_table(collect_proofs()))
    _replace_table(ROOT / "docs/field-cases.md", field_cases.describe_table(field_cases.find_places(ROOT / "tests")))
