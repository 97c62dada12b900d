"""Metrics carry their reduction: how the values of micro-batches and ranks become one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sum:
    """A metric added up over micro-batches and ranks, such as a share of a globally normalised loss."""

    value: float | torch.Tensor


@dataclass(frozen=True)
class Mean:
    """A metric averaged with `weight`, such as a masked mean with its number of tokens."""

    value: float | torch.Tensor
    weight: float | torch.Tensor


@dataclass(frozen=True)
class Min:
    """A metric of which the smallest value counts; a part with nothing to measure says +inf."""

    value: float | torch.Tensor


@dataclass(frozen=True)
class Max:
    """A metric of which the largest value counts; a part with nothing to measure says -inf."""

    value: float | torch.Tensor


EMPTY = {Min: math.inf, Max: -math.inf}
"""What a part with nothing to measure says."""
Metrics = Mapping[str, float | torch.Tensor | Sum | Mean | Min | Max]


def reduce_metrics(parts: Iterable[tuple[Metrics, float]]) -> dict[str, float]:
    """Reduce micro-batch metrics to one number each; NaN where no part measured anything, or where one is NaN.

    Args:
        parts: (metrics of a micro-batch, number of its valid samples); a bare number is averaged with that weight.
    """
    columns: dict[str, list[Any]] = {}
    for metrics, num_valid_samples in parts:
        for name, metric in metrics.items():
            declared = metric if isinstance(metric, Sum | Mean | Min | Max) else Mean(metric, num_valid_samples)
            columns.setdefault(name, []).append(declared)
    return {name: _reduce(name, column) for name, column in columns.items()}


def _reduce(name: str, column: list[Any]) -> float:
    kind = type(column[0])
    if any(type(metric) is not kind for metric in column):
        raise TypeError(
            f"metric {name!r} is declared with different reductions in one step; use one of them throughout"
        )
    values = [float(metric.value) for metric in column]
    if kind is Sum:
        return sum(values)
    if kind in EMPTY:
        # Of tensors: min() and max() keep or lose a NaN depending on its place in the list.
        extreme = torch.tensor(values, dtype=torch.float64).aminmax()
        result = float(extreme.min if kind is Min else extreme.max)
        return math.nan if result == EMPTY[kind] else result
    weights = [float(metric.weight) for metric in column]
    total = sum(weights)
    # A part without weight says nothing, and its value may be 0/0.
    weighted = (value * weight for value, weight in zip(values, weights, strict=True) if weight)
    return sum(weighted) / total if total else float("nan")
