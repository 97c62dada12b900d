"""Data, reward functions and tools that a Python program passes as objects instead of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lucidrl.data.interfaces import Rows
from lucidrl.errors import ConfigError


@dataclass(frozen=True)
class PythonInputs:
    """Objects that `GRPOTrainer` and `SFTTrainer` accept in addition to settings; empty on the command line."""

    rows: Rows | None = None
    """Training rows, used instead of `data.file`."""
    validation_rows: Rows | None = None
    """Validation rows, used instead of `data.validation_file`."""
    rewards: Sequence[Callable[..., Any]] = ()
    """Reward functions, called in the driver, in addition to those of the setting `reward`."""
    tools: Sequence[Callable[..., Any]] = ()
    """Functions that the model may call, in addition to those of the setting `tools`."""

    def described(self) -> dict[str, str]:
        """Describe each object by the name of the trainer's argument, for the setting `python_inputs`."""
        found = {}
        if self.rows is not None:
            found["dataset"] = f"{len(self.rows)} rows"
        if self.validation_rows is not None:
            found["validation_dataset"] = f"{len(self.validation_rows)} rows"
        for name, functions in (("rewards", self.rewards), ("tools", self.tools)):
            if functions:
                found[name] = ", ".join(getattr(one, "__name__", type(one).__name__) for one in functions)
        return found

    def check(self, expected: Mapping[str, str], trainer: str, folder: Path | None) -> None:
        """Raise ConfigError if the settings of a run name other objects than these.

        Args:
            expected: `python_inputs` of the settings.
            trainer: name of the class that passes objects to such a run.
            folder: folder of the run to resume; None for a new run.
        """
        given = self.described()
        call = f"train(resume={str(folder)!r})" if folder is not None else "train()"
        if missing := [name for name in expected if name not in given]:
            objects = "; ".join(f"{name}: {expected[name]}" for name in missing)
            arguments = ", ".join(f"{name}=..." for name in expected)
            raise ConfigError(
                f"this run uses objects of a Python program ({objects}), which settings cannot hold; run it with "
                f"{trainer}(..., {arguments}).{call}"
            )
        if surplus := [name for name in given if name not in expected]:
            raise ConfigError(
                f"{folder or 'the config'} has its own {' and '.join(surplus)}, so {trainer} cannot pass objects for "
                f"it; remove {' and '.join(surplus)} from the arguments, or start a new run"
            )
