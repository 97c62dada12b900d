"""Specs of choices: indices, one-hot vectors and switches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lucidrl.envs.failures import at_least_one
from lucidrl.envs.specs.spec import Device, Shape, Spec, as_array, cast_exactly
from lucidrl.errors import ConfigError


class _Indices(Spec):
    """Indices, each below its count; the counts broadcast to the spec's shape."""

    def __init__(self, counts: int | np.ndarray, shape: Shape, dtype: torch.dtype, device: Device) -> None:
        super().__init__(shape, dtype, device)
        self._counts = counts
        try:
            cast_exactly(np.asarray(counts) - 1, self.numpy_dtype)
        except ValueError as error:
            raise ConfigError(f"{self} has more choices than its dtype has numbers; use a larger dtype") from error

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(rng.integers(self._counts, size=tuple(self.shape)), self.numpy_dtype)

    def _allows(self, array: np.ndarray) -> bool:
        return bool((array >= 0).all() and (array < self._counts).all())


class Categorical(_Indices):
    """One of `n` choices, as its index from 0."""

    def __init__(self, n: int, shape: Shape = (), dtype: torch.dtype = torch.int64, device: Device = None) -> None:
        self.n = at_least_one("n", n)
        super().__init__(self.n, shape, dtype, device)

    def _limits(self) -> dict[str, Any]:
        return {"n": self.n}


class MultiCategorical(_Indices):
    """Several choices, each as its index.

    Args:
        nvec: numbers of choices, of any shape.
        shape: ends in the shape of `nvec`, which is the default.
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
            raise ConfigError(f"shape={list(self.shape)} must end in {width}, the number of all choices")
        self._counts = counts
        self._starts = np.cumsum(counts) - counts

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        # numpy samples faster below one number than below an array
        below = self._counts if len(self._counts) > 1 else self.shape[-1]
        return self._one_hot(rng.integers(below, size=(*self.shape[:-1], len(self._counts))))

    def _allows(self, array: np.ndarray) -> bool:
        if not ((array == 0) | (array == 1)).all():
            return False
        return bool((np.add.reduceat(array, self._starts, axis=-1, dtype=np.int64) == 1).all())

    def _one_hot(self, indices: np.ndarray) -> np.ndarray:
        """The vectors of [..., blocks] indices."""
        array = np.zeros(self.shape, self.numpy_dtype)
        rows = array.reshape(-1, self.shape[-1])
        rows[np.arange(len(rows))[:, None], (indices + self._starts).reshape(len(rows), -1)] = 1
        return array

    def _checked_indices(self, value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        indices = np.broadcast_to(cast_exactly(value, np.dtype(np.int64)), shape)
        if (indices < 0).any() or (indices >= self._counts).any():
            raise ValueError("an index is negative or beyond the last choice")
        return indices


class OneHot(_OneHots):
    """One of `n` choices, as a one-hot vector."""

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
    """Several choices, as concatenated one-hot vectors.

    Args:
        nvec: numbers of choices.
        shape: ends in the sum of `nvec`, which is the default.
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
    """Switches: zeros and ones.

    Args:
        n: number of switches in the last dim; not needed with `shape`.
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
            raise ConfigError(f"shape={list(self.shape)} must end in n={n}; give one of them")

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        return np.asarray(rng.integers(2, size=tuple(self.shape)), self.numpy_dtype)

    def _allows(self, array: np.ndarray) -> bool:
        return bool(((array == 0) | (array == 1)).all())


def _checked_counts(nvec: Any) -> np.ndarray:
    counts = as_array(nvec).astype(np.int64)
    if counts.ndim == 0 or counts.size == 0 or (counts < 1).any():
        raise ConfigError(f"nvec={nvec!r} must be a list of numbers, each at least 1")
    return counts
