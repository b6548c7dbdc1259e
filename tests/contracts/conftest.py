"""The vLLM releases that the contract tests ask: the installed one, and the next as source."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from vllm_process import VllmProcess, start_installed, start_next

RELEASES = ("installed", "next")


@pytest.fixture(scope="session")
def releases() -> Iterator[dict[str, VllmProcess]]:
    """Both releases; they start at the same time, which takes a quarter of a minute."""
    processes = {"installed": start_installed(), "next": start_next()}
    yield processes
    for process in processes.values():
        process.close()


@pytest.fixture(params=RELEASES)
def vllm(request: pytest.FixtureRequest, releases: dict[str, VllmProcess]) -> VllmProcess:
    """Each release in turn."""
    return releases[request.param]


@pytest.fixture
def installed_vllm(releases: dict[str, VllmProcess]) -> VllmProcess:
    """The release that is installed."""
    return releases["installed"]


@pytest.fixture
def next_vllm(releases: dict[str, VllmProcess]) -> VllmProcess:
    """The release behind the installed one."""
    return releases["next"]
