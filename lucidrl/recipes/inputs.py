"""Data and reward functions that a Python program passes as objects instead of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""Rows of a dataset: a list of dictionaries, a `datasets.Dataset`, or any other sequence of mappings."""


@dataclass(frozen=True)
class PythonInputs:
    """What `GRPOTrainer` and `SFTTrainer` accept beside settings; empty on the command line."""

    rows: Rows | None = None
    """Training rows, used instead of `data.file`."""
    validation_rows: Rows | None = None
    """Validation rows, used instead of `data.validation_file`."""
    rewards: Sequence[Callable[..., Any]] = ()
    """Reward functions, called in the driver; used beside those of `reward`."""
