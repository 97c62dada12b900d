"""Groups of weights with their own learning rate or weight decay, chosen by patterns of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lucidrl.errors import ConfigError
from lucidrl.models.muon import OnFullMatrix
from lucidrl.models.policy.config import ParameterGroupConfig


@dataclass(frozen=True)
class WeightInfo:
    """What the optimizer needs to know of a parameter that holds one weight."""

    name: str
    """Hugging Face name."""
    on_full_matrix: OnFullMatrix | None = None
    """How to gather the matrix for Muon; None if Muon does not update the weight."""


@dataclass(frozen=True)
class ParameterGroup:
    """Indices of parameters with the same settings."""

    pattern: str | None
    """None for the parameters that no pattern matches."""
    settings: dict[str, Any]
    """Arguments of the optimizer that differ from those of the other groups."""
    indices: list[int]


def grouped(weights: Sequence[WeightInfo], groups: Sequence[ParameterGroupConfig], key: str) -> list[ParameterGroup]:
    """Assign each weight to the first group whose pattern matches its name, or to a first group without a pattern.

    Args:
        key: setting that `groups` comes from, such as `policy.optimizer.groups`.

    Raises:
        ConfigError: a pattern matches no weight that is left.
    """
    left = dict(enumerate(weight.name for weight in weights))
    found = []
    for group in groups:
        indices = [index for index, name in left.items() if fnmatchcase(name, group.pattern)]
        if not indices:
            raise ConfigError(f"{key}: the pattern {group.pattern!r} {_why_unused(group.pattern, weights)}")
        settings = group.model_dump(exclude={"pattern"}, exclude_none=True)
        found.append(ParameterGroup(group.pattern, settings, indices))
        for index in indices:
            del left[index]
    return [ParameterGroup(None, {}, list(left)), *found]


def _why_unused(pattern: str, weights: Sequence[WeightInfo]) -> str:
    if any(fnmatchcase(weight.name, pattern) for weight in weights):
        return "matches only weights of earlier groups; put it before them, or remove it"
    example = weights[-1].name
    return f"matches no weight; match names such as {example}, with * for any characters"
