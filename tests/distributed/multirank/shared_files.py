"""What memory a rank shares with others, and whether any of it has a name that could be left behind."""

from pathlib import Path

from multirank.rank import Rank
from multirank.scenarios import Scenario, make_caches, make_group, run_on_caches


def run_and_look(rank: Rank, scenario: Scenario) -> tuple[frozenset[str], frozenset[str]]:
    """Run a scenario; what this process shares with others meanwhile, and when it has let go of its memory."""
    group = make_group(rank, scenario)
    caches = make_caches(scenario, group)
    run_on_caches(scenario, caches)
    used = find_shared_mappings()
    del caches
    group.gather("done")
    return used, find_shared_mappings()


def find_shared_mappings() -> frozenset[str]:
    """The paths of this process's shared mappings."""
    # address, permissions, offset, device, inode, path
    mappings = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return frozenset(fields[5] for fields in mappings if fields[1].endswith("s") and len(fields) == 6)
