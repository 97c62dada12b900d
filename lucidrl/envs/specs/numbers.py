"""Specs of numbers: unbounded, or between limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lucidrl.envs.specs.spec import Device, Shape, Spec, as_array, cast_exactly, short
from lucidrl.errors import ConfigError


class Unbounded(Spec):
    """Any numbers. Samples are normally distributed, or uniform over the range of an integer dtype."""

    def __init__(self, shape: Shape = (), dtype: torch.dtype = torch.float32, device: Device = None) -> None:
        super().__init__(shape, dtype, device)

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        if self.dtype.is_floating_point:
            return np.asarray(rng.standard_normal(self.shape), self.numpy_dtype)
        if self.dtype == torch.bool:
            return _integers_between(rng, 0, 1, self)
        limits = np.iinfo(self.numpy_dtype)
        return _integers_between(rng, limits.min, limits.max, self)

    def _allows(self, array: np.ndarray) -> bool:
        return not np.isnan(array).any()


class Bounded(Spec):
    """Numbers between two inclusive limits, which may be infinite.

    Samples are uniform between finite limits, exponential from a single one, normal without any.

    Args:
        low: number or array that broadcasts to `shape`.
        high: the same.
        shape: by default that of the limits.
    """

    def __init__(
        self, low: Any, high: Any, shape: Shape | None = None, dtype: torch.dtype = torch.float32, device: Device = None
    ) -> None:
        low, high = as_array(low), as_array(high)
        try:
            super().__init__(np.broadcast_shapes(low.shape, high.shape) if shape is None else shape, dtype, device)
            self._low, self._high = (cast_exactly(limit, self.numpy_dtype) for limit in (low, high))
            for limit in (low, high):
                np.broadcast_to(limit, self.shape)
        except ValueError as error:
            raise ConfigError(f"low={short(low)}, high={short(high)}: {error}") from error
        if not (self._low <= self._high).all():
            raise ConfigError(f"low={short(low)} is above high={short(high)}; give low <= high everywhere")

    @property
    def low(self) -> torch.Tensor:
        """Lower bounds, in the shape of the spec."""
        return self._tensor(self._low.copy()).expand(self.shape)

    @property
    def high(self) -> torch.Tensor:
        """Upper bounds, in the shape of the spec."""
        return self._tensor(self._high.copy()).expand(self.shape)

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        if not self.dtype.is_floating_point:
            return _integers_between(rng, self._low, self._high, self)
        low, high = self._low.astype(np.float64), self._high.astype(np.float64)
        if np.isfinite(low).all() and np.isfinite(high).all():
            share = rng.random(self.shape)
            values = low * (1 - share) + high * share  # high - low may overflow
        else:
            values = _half_open(rng, np.broadcast_to(low, self.shape), np.broadcast_to(high, self.shape))
        return np.asarray(np.clip(values, low, high), self.numpy_dtype)

    def _allows(self, array: np.ndarray) -> bool:
        return bool((array >= self._low).all() and (array <= self._high).all())

    def _limits(self) -> dict[str, Any]:
        return {"low": np.broadcast_to(self._low, self.shape), "high": np.broadcast_to(self._high, self.shape)}


def _integers_between(rng: np.random.Generator, low: Any, high: Any, spec: Spec) -> np.ndarray:
    drawn: Any = rng.integers(low, high, size=tuple(spec.shape), dtype=spec.numpy_dtype.type, endpoint=True)
    return np.asarray(drawn, spec.numpy_dtype)


def _half_open(rng: np.random.Generator, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    has_low, has_high = np.isfinite(low), np.isfinite(high)
    distance = rng.exponential(size=low.shape)
    values = rng.standard_normal(low.shape)
    values = np.where(has_low, low + distance, values)
    values = np.where(has_high, high - distance, values)
    between = rng.random(low.shape)
    with np.errstate(invalid="ignore"):  # infinite limits give NaN, which is not used
        inside = low * (1 - between) + high * between
    return np.where(has_low & has_high, inside, values)
