"""Spec: the base class of leaf specs, and conversions between torch and numpy dtypes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from lucidrl.errors import ConfigError, DataError

Shape = Sequence[int]
Device = torch.device | str | None


class Spec(ABC):
    """Shape, dtype and allowed values of one entry; immutable.

    Attributes:
        shape: shape of a value, including the env's batch size.
        dtype: dtype of a value.
        device: where `rand`, `zero` and `encode` put their tensors.
        numpy_dtype: numpy dtype of a value as an array.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: Device) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device("cpu" if device is None else device)
        self.numpy_dtype = numpy_dtype_of(dtype)

    def rand(self) -> torch.Tensor:
        """A random value, seeded by `torch.manual_seed`."""
        return self._tensor(self.sample(np.random.default_rng(int(torch.randint(2**63 - 1, ())))))

    def zero(self) -> torch.Tensor:
        """Zeros, even if the spec does not allow them."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def is_in(self, value: torch.Tensor) -> bool:
        """Whether the tensor has this shape and dtype, and allowed values only; NaN is never allowed."""
        return value.dtype == self.dtype and self.contains(value.detach().cpu().numpy())

    def encode(self, value: Any) -> torch.Tensor:
        """Convert a number or a list to a tensor of this spec; one-hot specs take the index.

        Raises:
            DataError: if the spec does not allow the value.
        """
        try:
            array = self._encode(as_array(value))
        except (TypeError, ValueError, IndexError) as error:
            raise DataError(f"{value!r} cannot be encoded as {self}: {error}") from error
        if not self.contains(array):
            raise DataError(f"{value!r} is not in {self}; give a value within its limits")
        return self._tensor(array)

    def expand(self, *shape: int | Shape) -> Self:
        """The same spec with more leading dims; `shape` is the whole new shape.

        Raises:
            ConfigError: if the new shape does not end in the present one.
        """
        new_shape = as_shape(shape)
        if new_shape[max(len(new_shape) - len(self.shape), 0) :] != self.shape:
            raise ConfigError(
                f"cannot expand {self} to {list(new_shape)}; the new shape must end with the spec's {list(self.shape)}"
            )
        return self._replaced(shape=new_shape)

    def to(self, device: Device) -> Self:
        """The same spec on `device`."""
        return self._replaced(device=torch.device("cpu" if device is None else device))

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """A random value as an array."""

    def contains(self, array: np.ndarray) -> bool:
        """`is_in` for an array."""
        return array.shape == self.shape and array.dtype == self.numpy_dtype and self._allows(array)

    @abstractmethod
    def _allows(self, array: np.ndarray) -> bool:
        """Whether all values are allowed, in an array of the right shape and dtype."""

    def _encode(self, value: np.ndarray) -> np.ndarray:
        return np.broadcast_to(cast_exactly(value, self.numpy_dtype), self.shape).copy()

    def _limits(self) -> dict[str, Any]:
        """Attributes by which specs of the same kind, shape and dtype differ."""
        return {}

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _replaced(self, **attributes: Any) -> Self:
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spec) or type(other) is not type(self):
            return False
        if (self.shape, self.dtype, self.device) != (other.shape, other.dtype, other.device):
            return False
        theirs = other._limits()
        return all(np.array_equal(limit, theirs[name]) for name, limit in self._limits().items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        parts = [f"{name}={short(limit)}" for name, limit in self._limits().items()]
        parts += [f"shape={list(self.shape)}", f"dtype={str(self.dtype).removeprefix('torch.')}"]
        if self.device.type != "cpu":
            parts.append(f"device={self.device}")
        return f"{type(self).__name__}({', '.join(parts)})"


def numpy_dtype_of(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype of arrays that share memory with tensors of `dtype`.

    Raises:
        ConfigError: if numpy has no such dtype, as for bfloat16.
    """
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise ConfigError(f"numpy has no {dtype}; choose another dtype") from error


def torch_dtype_of(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of tensors that share memory with arrays of `dtype`.

    Raises:
        ConfigError: if torch has no such dtype, as for text.
    """
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as error:
        raise ConfigError(f"torch has no equivalent of dtype {dtype}; use a numeric dtype or bool") from error


def as_shape(shape: tuple[int | Shape, ...]) -> torch.Size:
    """The shape from the arguments of a call: several numbers, or one sequence of numbers."""
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        return torch.Size(shape[0])
    return torch.Size(shape)  # type: ignore[arg-type]


def as_array(value: Any) -> np.ndarray:
    """A number, sequence, array or tensor as an array."""
    return np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)


def cast_exactly(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cast an array; a cast to a float dtype may round.

    Raises:
        ValueError: if a cast to another dtype would change values.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(cast, array):
        raise ValueError(f"{short(array)} cannot be written as {dtype}")
    return cast


def short(limit: Any) -> str:
    """A limit as short text; one number if all elements are equal."""
    array = np.asarray(limit)
    if array.size and (array == array.flat[0]).all():
        return str(array.flat[0])
    return np.array2string(array, separator=", ", threshold=8, precision=4).replace("\n", "")
