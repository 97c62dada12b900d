"""Metrics that carry their reduction over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


_LOWEST, _HIGHEST, _PER_DOUBLING = -30, 6, 8
_NUM_BINS = (_HIGHEST - _LOWEST) * _PER_DOUBLING + 2
"""One bin for values up to 2^-30, eight bins for each doubling up to 2^6, one bin for NaN."""


@dataclass(frozen=True)
class Quantile:
    """A quantile of values that are not negative, reduced over all values of all micro-batches and ranks.

    Values are counted in logarithmic bins, so the result lies within 5 % of the exact quantile. Values up to 1e-9 count
    as 0, values above 64 as 64.

    Example:
        >>> 47 < Quantile.of(torch.arange(1, 51), 0.99).value < 53
        True
    """

    counts: Sequence[int] | torch.Tensor
    """Number of values in each bin."""
    probability: float

    @classmethod
    def of(cls, values: torch.Tensor, probability: float) -> Quantile:
        """Count the values, of any shape."""
        values = values.detach().flatten().double()
        bins = ((values.log2() - _LOWEST) * _PER_DOUBLING).floor() + 1
        bins = bins.clamp(0, _NUM_BINS - 2).masked_fill(values.isnan(), _NUM_BINS - 1)
        return cls(torch.bincount(bins.long(), minlength=_NUM_BINS), probability)

    @property
    def value(self) -> float:
        """The quantile; NaN if there are no values, or if one is NaN."""
        counts = torch.as_tensor(self.counts)
        total = int(counts.sum())
        if not total or counts[-1]:
            return math.nan
        reached = int((counts.cumsum(0) >= self.probability * total).nonzero()[0])
        return 2 ** (_LOWEST + (reached - 0.5) / _PER_DOUBLING) if reached else 0.0


EMPTY = {Min: math.inf, Max: -math.inf}
"""Value of a metric in a micro-batch without values."""
Metric = Sum | Mean | Min | Max | Quantile
Metrics = Mapping[str, float | torch.Tensor | Metric]


def reduce_metrics(parts: Iterable[tuple[Metrics, float]]) -> dict[str, float]:
    """Reduce each metric to one number; NaN if the metric has no values, or if one is NaN.

    Args:
        parts: pairs (metrics of a micro-batch, number of its valid samples); the number is the weight of metrics
            without a declared reduction, which are averaged.
    """
    columns: dict[str, list[Any]] = {}
    for metrics, num_valid_samples in parts:
        for name, metric in metrics.items():
            declared = metric if isinstance(metric, Metric) else Mean(metric, num_valid_samples)
            columns.setdefault(name, []).append(declared)
    return {name: _reduce(name, column) for name, column in columns.items()}


def _reduce(name: str, column: list[Any]) -> float:
    kind = type(column[0])
    if any(type(metric) is not kind for metric in column):
        raise TypeError(f"metric {name!r} has different reductions in one step; always return the same reduction")
    if kind is Quantile:
        counts = torch.stack([torch.as_tensor(metric.counts).cpu() for metric in column]).sum(dim=0)
        return Quantile(counts, column[0].probability).value
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
