"""Whether this process has per-frame ranges: decided once, when `lucidrl` is imported. Imports nothing heavy."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping

VARIABLES = ("LUCIDRL_PROFILING", "TORCHRL_PROFILING")
"""Either arms; the first one that is set decides. Processes started later find them in their environment."""


def _asks_for_ranges(environment: Mapping[str, str]) -> bool:
    given = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    return given.lower() in ("1", "true", "yes", "on")


is_armed = _asks_for_ranges(os.environ)
"""Whether functions are wrapped when they are defined; never changes after that."""
is_enabled = is_armed
"""Whether wrapped functions show up; see `set_profiling_enabled`."""


def set_profiling_enabled(enabled: bool) -> None:
    """Let the per-frame ranges of this process show up, or silence them, from now on.

    They must have been armed before `lucidrl` was imported: otherwise there are none, and this warns and does nothing.
    Workers of a collector are told by `collector.map_fn("set_profiling_enabled", [(True,)] * collector.num_workers)`.
    """
    global is_enabled
    if enabled and not is_armed:
        warnings.warn(
            f"the ranges cannot be switched on: set {VARIABLES[0]}=1 before lucidrl is imported, which decides whether "
            "there are any",
            stacklevel=2,
        )
        return
    is_enabled = enabled


def arm() -> bool:
    """Arm this process and those that it starts, as if the variable had been set; False if that comes too late."""
    global is_armed, is_enabled
    os.environ[VARIABLES[0]] = "1"
    if "lucidrl.profiling.ranges" not in sys.modules:
        is_armed = is_enabled = True
    return is_armed


def armed_environment() -> dict[str, str]:
    """The variables that arm another process as this one is."""
    return dict.fromkeys(VARIABLES, "1") if is_armed else {}
