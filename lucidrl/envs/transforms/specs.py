"""What transforms ask of specs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lucidrl.envs.specs import Bounded, Spec, Unbounded
from lucidrl.envs.specs.spec import torch_dtype_of


def mapped_spec(spec: Spec, function: Callable[[np.ndarray], np.ndarray]) -> Spec:
    """The spec of `function(value)`, which grows, or falls, with every element of the value."""
    limits = (spec.low, spec.high) if isinstance(spec, Bounded) else (spec.zero(), spec.zero())
    with np.errstate(all="ignore"):  # infinite limits may overflow or become NaN
        first, second = (function(limit.cpu().numpy()) for limit in limits)
    dtype = torch_dtype_of(first.dtype)
    if not isinstance(spec, Bounded) or np.isnan(first).any() or np.isnan(second).any():
        return Unbounded(first.shape, dtype, spec.device)
    return Bounded(np.minimum(first, second), np.maximum(first, second), first.shape, dtype, spec.device)
