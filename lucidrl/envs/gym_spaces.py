"""Codecs that convert values of gymnasium spaces to arrays and back; made once per space, so a step only copies."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lucidrl.envs.arrays import Arrays, Key, path_of
from lucidrl.envs.failures import checked_array
from lucidrl.envs.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Spec,
    Unbounded,
)
from lucidrl.envs.specs.spec import torch_dtype_of
from lucidrl.errors import ConfigError, DataError, EnvironmentFailure

if TYPE_CHECKING:
    from gymnasium import Space


class Codec(ABC):
    """Converts values of one space to and from arrays."""

    spec: Spec | Composite
    """Spec of a single value."""

    @abstractmethod
    def write(self, value: Any, arrays: Arrays) -> None:
        """Write a value that an env returned.

        Raises:
            EnvironmentFailure: if shape, dtype or value do not fit the space.
        """

    @abstractmethod
    def read(self, arrays: Mapping[Key, np.ndarray]) -> Any:
        """Read a value to pass to an env; it shares no memory with the arrays.

        Raises:
            DataError: if the arrays hold no valid index or one-hot vector.
        """


def codec_of(key: Key, space: Space, categorical: bool) -> Codec:
    """Make the codec of a space.

    Args:
        key: key of the entry; the entries of a Dict or Tuple space are below it. () is the top level.
        categorical: discrete values are indices; otherwise they are one-hot vectors.

    Raises:
        ConfigError: for an unsupported space.
    """
    from gymnasium import spaces

    match space:
        case spaces.Box():
            return _ArrayCodec(key, _box_spec(space))
        case spaces.MultiBinary():
            return _ArrayCodec(key, Binary(shape=space.shape))
        case spaces.Discrete():
            return _IndexCodec(key, space) if categorical else _OneHotCodec(key, space)
        case spaces.MultiDiscrete():
            return _MultiIndexCodec(key, space) if categorical else _MultiOneHotCodec(key, space)
        case spaces.Dict():
            if unnamed := [name for name in space.spaces if not isinstance(name, str)]:
                raise ConfigError(f"{space} has the key {unnamed[0]!r}; use strings as keys")
            return _NestedCodec(key, space.spaces, dict, categorical)
        case spaces.Tuple():
            parts = dict(enumerate(space.spaces))
            return _NestedCodec(key, parts, lambda values: tuple(value for _, value in values), categorical)
    supported = "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
    raise ConfigError(f"{key!r} has the unsupported space {space}; wrap the env to use {supported}")


class _ArrayCodec(Codec):
    """Codec of arrays and numbers: copies their values unchanged."""

    def __init__(self, key: Key, spec: Spec) -> None:
        self.spec = spec
        self._key = key

    def write(self, value: Any, arrays: Arrays) -> None:
        array = arrays[self._key]
        array[...] = checked_array(self._key, value, array)

    def read(self, arrays: Mapping[Key, np.ndarray]) -> np.ndarray:
        return np.array(arrays[self._key])


class _IndexCodec(Codec):
    def __init__(self, key: Key, space: Any) -> None:
        self.spec = Categorical(int(space.n))
        self._key, self._space = key, space
        self._n, self._start = int(space.n), int(space.start)

    def write(self, value: Any, arrays: Arrays) -> None:
        arrays[self._key][...] = _index(self._key, value, self._space)

    def read(self, arrays: Mapping[Key, np.ndarray]) -> int:
        index = int(arrays[self._key])
        if not 0 <= index < self._n:
            raise DataError(
                f"{self._key!r} is {index}, but has {self._n} discrete values; use an index from 0 to {self._n - 1}"
            )
        return index + self._start


class _OneHotCodec(Codec):
    def __init__(self, key: Key, space: Any) -> None:
        self.spec = OneHot(int(space.n))
        self._key, self._space = key, space
        self._start = int(space.start)

    def write(self, value: Any, arrays: Arrays) -> None:
        array = arrays[self._key]
        array.fill(0)
        array[_index(self._key, value, self._space)] = 1

    def read(self, arrays: Mapping[Key, np.ndarray]) -> int:
        values = arrays[self._key].tolist()
        try:
            return values.index(1) + self._start  # faster than argmax, and raises if no value is 1
        except ValueError:
            raise _no_one_hot(self._key, values) from None


class _MultiIndexCodec(Codec):
    def __init__(self, key: Key, space: Any) -> None:
        self.spec = MultiCategorical(space.nvec)
        self._key, self._space = key, space

    def write(self, value: Any, arrays: Arrays) -> None:
        arrays[self._key][...] = _indices(self._key, value, self._space)

    def read(self, arrays: Mapping[Key, np.ndarray]) -> np.ndarray:
        indices = arrays[self._key]
        if (indices < 0).any() or (indices >= self._space.nvec).any():
            raise DataError(
                f"{self._key!r} is {indices.tolist()}; every index must be from 0 to below {self._space.nvec.tolist()}"
            )
        return (indices + self._space.start).astype(self._space.dtype)


class _MultiOneHotCodec(Codec):
    """Codec of MultiDiscrete as one-hot vectors; a space of several dims becomes one flat vector."""

    def __init__(self, key: Key, space: Any) -> None:
        counts = space.nvec.reshape(-1)
        self.spec = MultiOneHot(counts)
        ends = np.cumsum(counts).tolist()
        self._key, self._space = key, space
        self._starts = np.array([0, *ends[:-1]])
        self._blocks = list(zip(self._starts.tolist(), ends, strict=True))

    def write(self, value: Any, arrays: Arrays) -> None:
        array = arrays[self._key]
        array.fill(0)
        array[_indices(self._key, value, self._space).reshape(-1) + self._starts] = 1

    def read(self, arrays: Mapping[Key, np.ndarray]) -> np.ndarray:
        values = arrays[self._key].tolist()
        try:
            indices = [values.index(1, start, end) - start for start, end in self._blocks]
        except ValueError:
            raise _no_one_hot(self._key, values) from None
        return (np.array(indices).reshape(self._space.shape) + self._space.start).astype(self._space.dtype)


class _NestedCodec(Codec):
    """Codec of Dict and Tuple spaces."""

    spec: Composite

    def __init__(self, key: Key, parts: Mapping[Any, Any], make: Callable[[Iterable[Any]], Any], categorical: bool):
        self._codecs = {name: codec_of(_below(key, str(name)), part, categorical) for name, part in parts.items()}
        self._make = make
        self.spec = Composite({str(name): codec.spec for name, codec in self._codecs.items()})

    def write(self, value: Any, arrays: Arrays) -> None:
        parts = dict(enumerate(value)) if isinstance(value, tuple | list) else value
        if not isinstance(parts, Mapping) or parts.keys() != self._codecs.keys():
            got = f"the keys {sorted(map(str, parts))}" if isinstance(parts, Mapping) else f"a {type(value).__name__}"
            expected = sorted(map(str, self._codecs))
            raise EnvironmentFailure(f"the env returned {got}, but its space has {expected}; fix the env or its space")
        for name, codec in self._codecs.items():
            codec.write(parts[name], arrays)

    def read(self, arrays: Mapping[Key, np.ndarray]) -> Any:
        return self._make((name, codec.read(arrays)) for name, codec in self._codecs.items())


def _below(key: Key, name: str) -> Key:
    path = (*path_of(key), name)
    return path if len(path) > 1 else name


def _box_spec(space: Any) -> Spec:
    dtype = torch_dtype_of(space.dtype)
    if space.dtype.kind == "f" and np.isinf(space.low).all() and np.isinf(space.high).all():
        return Unbounded(space.shape, dtype)
    return Bounded(space.low, space.high, space.shape, dtype)


def _index(key: Key, value: Any, space: Any) -> int:
    """Index of a value of a Discrete space."""
    try:
        index = operator.index(value) - int(space.start)
    except TypeError:
        raise EnvironmentFailure(f"{key!r} is {value!r}, but its space is {space}; fix the env") from None
    if not 0 <= index < space.n:
        raise EnvironmentFailure(f"{key!r} is {value}, which is not in its space {space}; fix the env or its space")
    return index


def _indices(key: Key, value: Any, space: Any) -> np.ndarray:
    """Indices of a value of a MultiDiscrete space."""
    indices = checked_array(key, value, space.nvec) - space.start
    if (indices < 0).any() or (indices >= space.nvec).any():
        values = np.asarray(value).tolist()
        raise EnvironmentFailure(f"{key!r} is {values}, which is not in its space {space}; fix the env or its space")
    return indices


def _no_one_hot(key: Key, values: list[float]) -> DataError:
    return DataError(
        f"{key!r} is {values}, not a one-hot vector; fix the policy, or set categorical_action_encoding=True to pass "
        "indices"
    )
