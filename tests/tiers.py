"""The two tiers of tests: `make test` runs the quick ones, `make test-all` also those marked slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of which only those in `quick` run in the quick tier.

    Example:
        @pytest.mark.parametrize("layout", slow_except(LAYOUTS, "tp2"))
    """
    values = list(values)
    unknown = [value for value in quick if value not in values]
    assert not unknown, f"{unknown} are not among {values}"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
