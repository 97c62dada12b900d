"""Profiling: spans of phases, ranges in code that runs for every env step, and traces of both on one clock.

Modules are imported at first use, to keep `import lucidrl` fast.
"""

import importlib
from typing import Any

from lucidrl.profiling.gate import set_profiling_enabled

_HOMES = {
    "_ProfilerHook": "lucidrl.profiling.hook",
    "_maybe_record_function": "lucidrl.profiling.ranges",
    "profiled": "lucidrl.profiling.ranges",
    "span": "lucidrl.profiling.spans",
}

__all__ = ["set_profiling_enabled", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
