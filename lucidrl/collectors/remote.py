"""Collectors as Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lucidrl.profiling.gate import VARIABLES
from lucidrl.utils.imports import require_package
from lucidrl.utils.nsys_launch import runtime_env_for


def actor_class(cls: type, options: Mapping[str, Any]) -> Any:
    """The class as a Ray actor class, whose processes record, and have per-frame ranges, if those of this machine do.

    Args:
        options: of `ray.remote`; neither they nor what is in them is changed, and what they say counts.
    """
    require_package("ray", f"{cls.__name__}.as_remote()")
    import ray

    given = dict(options)
    if needed := runtime_env_for(cls.__name__):
        own: Mapping[str, Any] = given.get("runtime_env") or {}
        own_variables = own.get("env_vars") or {}
        variables = dict(needed.pop("env_vars", {}))
        if not own_variables.keys().isdisjoint(VARIABLES):  # a caller who names one has decided
            variables = {name: value for name, value in variables.items() if name not in VARIABLES}
        given["runtime_env"] = {**needed, **own, "env_vars": {**variables, **own_variables}}
    return ray.remote(**given)(cls) if given else ray.remote(cls)
