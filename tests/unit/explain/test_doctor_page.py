"""docs/doctor.md shows what `vllm-kvpp explain` prints."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs/doctor.md").read_text()
LOG = re.search(r"```text\n(\(EngineCore.*?)```", PAGE, flags=re.DOTALL)[1]
SHOWN = re.search(r"vllm-kvpp explain server.log\n```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)[1]


def test_the_example_shows_what_is_printed(run, tmp_path, monkeypatch):
    (tmp_path / "server.log").write_text(LOG)
    monkeypatch.chdir(tmp_path)

    assert [line.rstrip() for line in run("server.log").stdout.rstrip().splitlines()] == SHOWN.rstrip().splitlines()


def test_the_example_holds_together(explained):
    found = explained(LOG.splitlines())

    assert found.gain.plan.capacity.num_blocks_without == found.blocks.num_blocks
