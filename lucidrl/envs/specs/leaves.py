"""Specs of numbers (unbounded or bounded) and of discrete values (indices, one-hot vectors, zeros and ones)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lucidrl.envs.failures import at_least_one
from lucidrl.envs.specs.spec import Device, Shape, Spec, as_array, cast_exactly, short
from lucidrl.errors import ConfigError


class Unbounded(Spec):
    """Any numbers. Samples are normally distributed, for an integer dtype uniform over its range."""

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

    Samples are uniform between two finite limits, exponential from a single finite limit, and normal without one.

    Args:
        low: lower limit, a number or an array that broadcasts to `shape`.
        high: upper limit, likewise.
        shape: by default the shape of the limits.
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


class _Indices(Spec):
    """Indices, each below its count; the counts broadcast to the spec's shape."""

    def __init__(self, counts: int | np.ndarray, shape: Shape, dtype: torch.dtype, device: Device) -> None:
        super().__init__(shape, dtype, device)
        self._counts = counts
        try:
            cast_exactly(np.asarray(counts) - 1, self.numpy_dtype)
        except ValueError as error:
            raise ConfigError(f"{self} has more values than its dtype can represent; use a larger dtype") from error

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(rng.integers(self._counts, size=tuple(self.shape)), self.numpy_dtype)

    def _allows(self, array: np.ndarray) -> bool:
        return bool((array >= 0).all() and (array < self._counts).all())


class Categorical(_Indices):
    """One of `n` values, as its index from 0."""

    def __init__(self, n: int, shape: Shape = (), dtype: torch.dtype = torch.int64, device: Device = None) -> None:
        self.n = at_least_one("n", n)
        super().__init__(self.n, shape, dtype, device)

    def _limits(self) -> dict[str, Any]:
        return {"n": self.n}


class MultiCategorical(_Indices):
    """Several discrete values, each as its index.

    Args:
        nvec: number of values of each index, of any shape.
        shape: must end in the shape of `nvec`, which is the default.
    """

    def __init__(
        self, nvec: Any, shape: Shape | None = None, dtype: torch.dtype = torch.int64, device: Device = None
    ) -> None:
        self.nvec = _checked_counts(nvec)
        super().__init__(self.nvec, self.nvec.shape if shape is None else shape, dtype, device)
        if self.shape[len(self.shape) - self.nvec.ndim :] != self.nvec.shape:
            raise ConfigError(f"shape={list(self.shape)} must end in the shape of nvec, {list(self.nvec.shape)}")

    def _limits(self) -> dict[str, Any]:
        return {"nvec": self.nvec}


class _OneHots(Spec):
    """One-hot vectors side by side in the last dim."""

    def __init__(self, counts: np.ndarray, shape: Shape | None, dtype: torch.dtype, device: Device) -> None:
        width = int(counts.sum())
        super().__init__((width,) if shape is None else shape, dtype, device)
        if not self.shape or self.shape[-1] != width:
            raise ConfigError(
                f"shape={list(self.shape)} must end in {width}, the number of values of all one-hot vectors"
            )
        self._counts = counts
        self._starts = np.cumsum(counts) - counts

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        # numpy is faster with one upper bound than with an array of bounds
        below = self._counts if len(self._counts) > 1 else self.shape[-1]
        return self._one_hot(rng.integers(below, size=(*self.shape[:-1], len(self._counts))))

    def _allows(self, array: np.ndarray) -> bool:
        if not ((array == 0) | (array == 1)).all():
            return False
        return bool((np.add.reduceat(array, self._starts, axis=-1, dtype=np.int64) == 1).all())

    def _one_hot(self, indices: np.ndarray) -> np.ndarray:
        """The concatenated one-hot vectors of indices [..., number of vectors]."""
        array = np.zeros(self.shape, self.numpy_dtype)
        rows = array.reshape(-1, self.shape[-1])
        rows[np.arange(len(rows))[:, None], (indices + self._starts).reshape(len(rows), -1)] = 1
        return array

    def _checked_indices(self, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        indices = np.broadcast_to(cast_exactly(value, np.dtype(np.int64)), shape)
        if (indices < 0).any() or (indices >= self._counts).any():
            counts = ", ".join(map(str, np.unique(self._counts)))
            raise ValueError(f"an index is below 0, or not below the number of values ({counts}); correct the index")
        return indices


class OneHot(_OneHots):
    """One of `n` values, as a one-hot vector."""

    def __init__(
        self, n: int, shape: Shape | None = None, dtype: torch.dtype = torch.int64, device: Device = None
    ) -> None:
        self.n = at_least_one("n", n)
        super().__init__(np.array([n]), shape, dtype, device)

    def _encode(self, value: np.ndarray) -> np.ndarray:
        return self._one_hot(self._checked_indices(value[..., None], (*self.shape[:-1], 1)))

    def _limits(self) -> dict[str, Any]:
        return {"n": self.n}


class MultiOneHot(_OneHots):
    """Several discrete values, as concatenated one-hot vectors.

    Args:
        nvec: length of each one-hot vector.
        shape: must end in the sum of `nvec`, which is the default.
    """

    def __init__(
        self,
        nvec: Sequence[int] | np.ndarray,
        shape: Shape | None = None,
        dtype: torch.dtype = torch.int64,
        device: Device = None,
    ) -> None:
        self.nvec = _checked_counts(nvec)
        if self.nvec.ndim != 1:
            raise ConfigError(f"nvec has shape {list(self.nvec.shape)}; give a flat list")
        super().__init__(self.nvec, shape, dtype, device)

    def _encode(self, value: np.ndarray) -> np.ndarray:
        return self._one_hot(self._checked_indices(value, (*self.shape[:-1], len(self.nvec))))

    def _limits(self) -> dict[str, Any]:
        return {"nvec": self.nvec}


class Binary(Spec):
    """Zeros and ones, each independent.

    Args:
        n: size of the last dim; not needed with `shape`.
        shape: by default (n,).
    """

    def __init__(
        self,
        n: int | None = None,
        shape: Shape | None = None,
        dtype: torch.dtype = torch.int8,
        device: Device = None,
    ) -> None:
        if shape is None:
            if n is None:
                raise ConfigError("a Binary spec needs a size; give n or shape")
            shape = (at_least_one("n", n),)
        super().__init__(shape, dtype, device)
        if n is not None and self.shape[-1:] != (n,):
            raise ConfigError(f"shape={list(self.shape)} must end in n={n}; give only n or only shape")

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(rng.integers(2, size=tuple(self.shape)), self.numpy_dtype)

    def _allows(self, array: np.ndarray) -> bool:
        return bool(((array == 0) | (array == 1)).all())


def _checked_counts(nvec: Any) -> np.ndarray:
    counts = as_array(nvec).astype(np.int64)
    if counts.ndim == 0 or counts.size == 0 or (counts < 1).any():
        raise ConfigError(f"nvec={nvec!r} must be a list of numbers, each at least 1")
    return counts
