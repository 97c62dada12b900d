"""Whether this process has the per-frame ranges of `lucidrl.profiling.ranges`, decided when `lucidrl` is imported.

Imports nothing heavy.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping

VARIABLES = ("LUCIDRL_PROFILING", "TORCHRL_PROFILING")
"""Environment variables that arm the ranges; the first one that is set decides. Child processes inherit them."""


def _asks_for_ranges(environment: Mapping[str, str]) -> bool:
    given = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    return given.lower() in ("1", "true", "yes", "on")


is_armed = _asks_for_ranges(os.environ)
"""Whether functions are wrapped when they are defined."""
is_enabled = is_armed
"""Whether wrapped functions are recorded; see `set_profiling_enabled`."""


def set_profiling_enabled(enabled: bool) -> None:
    """Turn the per-frame ranges of this process on or off.

    The ranges must have been armed (LUCIDRL_PROFILING=1) before the import of `lucidrl`; otherwise this only warns. For
    the workers of a collector, call `collector.map_fn("set_profiling_enabled", [(True,)] * collector.num_workers)`.
    """
    global is_enabled
    if enabled and not is_armed:
        warnings.warn(
            f"profiling ranges cannot be switched on now: set {VARIABLES[0]}=1 before lucidrl is imported",
            stacklevel=2,
        )
        return
    is_enabled = enabled


def arm() -> bool:
    """Arm this process and its children, as the variable does; False if it is too late for this process."""
    global is_armed, is_enabled
    os.environ[VARIABLES[0]] = "1"
    if "lucidrl.profiling.ranges" not in sys.modules:
        is_armed = is_enabled = True
    return is_armed


def armed_environment() -> dict[str, str]:
    """The variables that arm another process like this one."""
    return dict.fromkeys(VARIABLES, "1") if is_armed else {}
