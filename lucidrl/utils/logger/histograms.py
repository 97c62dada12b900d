"""Histograms of metrics that are lists."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from lucidrl.utils.logger.values import Scalar

_NUM_BINS = 64


def finite_histogram(values: Sequence[Scalar]) -> tuple[np.ndarray, np.ndarray] | None:
    """Counts and bin edges of the finite values, or None if there are none; any values, however far apart."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    if not array.size:
        return None
    low, high = float(array.min()), float(array.max())
    if low == high:
        margin = max(0.5, abs(low) * 2**-20)  # visible also beside a large number
        low, high = max(low - margin, -sys.float_info.max), min(high + margin, sys.float_info.max)
    unit = 2 if math.isinf(high - low) else 1  # the distance of two halves is always a float
    # Explicit edges, because numpy refuses to choose them for values that are nearly equal.
    return np.histogram(array, bins=unit * np.linspace(low / unit, high / unit, _NUM_BINS + 1))
