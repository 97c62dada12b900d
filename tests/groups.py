"""Which tests run in the same xdist worker: those that share a Ray cluster, a pool of ranks, or a file.

`--dist loadgroup` of xdist is for this, but xdist 3.8 loses its groups with pytest 9.2: it writes them into node ids,
which can no longer be changed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
RANK_POOLS = ("two_ranks", "four_ranks")
START_FIRST = ("ranks", "ray", "tests/faults", "tests/unit/recipes", "tests/unit/test_cli.py", "tests/unit/collectors")
"""Groups of tests that take longest; the short ones then fill the time until both workers are done."""


@cache
def group_of(file: str) -> str:
    """Group of a test file, whose path is relative to the repository."""
    if file.startswith("tests/ray/"):
        return "ray"
    text = (ROOT / file).read_text(encoding="utf-8")
    return "ranks" if any(pool in text for pool in RANK_POOLS) else file


def priority_of(file: str) -> int:
    group = group_of(file)
    return next((number for number, prefix in enumerate(START_FIRST) if group.startswith(prefix)), len(START_FIRST))


class GroupScheduling(LoadScopeScheduling):
    """Gives a worker all tests of a group at once."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])
