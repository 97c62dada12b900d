"""Histograms of metrics that are lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from lucidrl.utils.logger.values import Scalar

_NUM_BINS = 64


def finite_histogram(values: Sequence[Scalar]) -> tuple[np.ndarray, np.ndarray] | None:
    """Counts and bin edges of the finite values, or None if there are none."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    if not array.size:
        return None
    low, high = array.min(), array.max()
    if low == high:
        low, high = low - 0.5, high + 0.5
    # Explicit edges, because numpy refuses to choose them for values that are nearly equal.
    counts, edges = np.histogram(array, bins=np.linspace(low, high, _NUM_BINS + 1))
    return counts, edges
