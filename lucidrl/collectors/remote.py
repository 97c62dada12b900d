"""Collectors as Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lucidrl.profiling.gate import VARIABLES, armed_environment
from lucidrl.utils.imports import require_package


def actor_class(cls: type, options: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> Any:
    """The class as a Ray actor class, whose processes have per-frame ranges if this one does.

    Args:
        options: of `ray.remote`; neither they nor what is in them is changed, and what they say counts.
        variables: more of them for the environment of its processes.
    """
    require_package("ray", f"{cls.__name__}.as_remote()")
    import ray

    given, added = dict(options), dict(variables or {})
    own: Mapping[str, Any] = given.get("runtime_env") or {}
    own_variables = own.get("env_vars") or {}
    if own_variables.keys().isdisjoint(VARIABLES):  # otherwise the caller has decided
        added.update(armed_environment())
    if added:
        given["runtime_env"] = {**own, "env_vars": {**added, **own_variables}}
    return ray.remote(**given)(cls) if given else ray.remote(cls)
