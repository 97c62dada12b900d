"""Metrics that carry their reduction over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sum:
    """A metric summed over micro-batches and ranks, such as a summand of a globally normalised loss."""

    value: float | torch.Tensor


@dataclass(frozen=True)
class Mean:
    """A metric averaged with `weight`, such as a masked mean with its number of tokens."""

    value: float | torch.Tensor
    weight: float | torch.Tensor


@dataclass(frozen=True)
class Min:
    """A metric reduced to its minimum; +inf in a micro-batch without values."""

    value: float | torch.Tensor


@dataclass(frozen=True)
class Max:
    """A metric reduced to its maximum; -inf in a micro-batch without values."""

    value: float | torch.Tensor


EMPTY = {Min: math.inf, Max: -math.inf}
"""Value of a metric in a micro-batch without values."""
Metrics = Mapping[str, float | torch.Tensor | Sum | Mean | Min | Max]


def reduce_metrics(parts: Iterable[tuple[Metrics, float]]) -> dict[str, float]:
    """Reduce each metric to one number; NaN if the metric has no values, or if one is NaN.

    Args:
        parts: pairs (metrics of a micro-batch, number of its valid samples); the number is the weight of metrics
            without a declared reduction, which are averaged.
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
        raise TypeError(f"metric {name!r} has different reductions in one step; always return the same reduction")
    values = [float(metric.value) for metric in column]
    if kind is Sum:
        return sum(values)
    if kind in EMPTY:
        # torch propagates NaN; min() and max() may lose it.
        extreme = torch.tensor(values, dtype=torch.float64).aminmax()
        result = float(extreme.min if kind is Min else extreme.max)
        return math.nan if result == EMPTY[kind] else result
    weights = [float(metric.weight) for metric in column]
    total = sum(weights)
    # The value of a micro-batch with weight 0 may be 0/0.
    weighted = (value * weight for value, weight in zip(values, weights, strict=True) if weight)
    return sum(weighted) / total if total else float("nan")
