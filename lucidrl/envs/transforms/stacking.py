"""Transforms that concatenate values of several frames or entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from lucidrl.envs.arrays import Arrays, Frame, Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.failures import at_least_one
from lucidrl.envs.specs import Bounded, Composite, Spec, Unbounded
from lucidrl.envs.transforms.base import Keys, Transform, mapped_spec, rows_of
from lucidrl.errors import ConfigError

_Value = TypeVar("_Value", np.ndarray, torch.Tensor)


class CatFrames(Transform):
    """Concatenates the last `N` values of an entry, the newest last.

    Args:
        dim: dim to concatenate, counted from the end: -3 for the channels of an image, -1 for a vector.
        padding: values for frames before the reset: "same" repeats the first value, "constant" uses `padding_value`.
    """

    def __init__(
        self,
        N: int,
        dim: int,
        in_keys: Keys = ("pixels",),
        out_keys: Keys | None = None,
        padding: Literal["same", "constant"] = "same",
        padding_value: float = 0,
    ):
        super().__init__(in_keys, out_keys)
        if dim >= 0:
            raise ConfigError(f"dim={dim} would depend on the env's batch size; count from the end, such as -1")
        if padding not in ("same", "constant"):
            raise ConfigError(f"padding={padding!r} is unknown; give 'same' or 'constant'")
        self.N = at_least_one("N", N)
        self.dim, self.padding, self.padding_value = dim, padding, padding_value

    def prepare(self, env: EnvBase) -> None:
        self._latest: Arrays = {}
        for key in self.in_keys:
            shape = env.observation_leaves()[key].shape
            if len(shape) - len(env.batch_size) < -self.dim:
                raise ConfigError(f"dim={self.dim} is not a dim of {key!r}, which has shape {list(shape)}")
            self._latest[key] = self._repeated(env.new_frame().observation[key])

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            first = rows_of(source.observation[in_key], mask)
            values = self._repeated(first)
            if self.padding == "constant":
                self._cut(values, 0, (self.N - 1) * first.shape[self.dim])[...] = self.padding_value
            rows = ... if mask is None else mask
            self._latest[in_key][rows] = values
            target.observation[out_key][rows] = values

    def step(self, source: Frame, target: Frame) -> None:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            newest, latest = source.observation[in_key], self._latest[in_key]
            size = newest.shape[self.dim]
            kept = (self.N - 1) * size
            self._cut(latest, 0, kept)[...] = self._cut(latest, size, kept)
            self._cut(latest, kept, size)[...] = newest
            target.observation[out_key][...] = latest

    def transform_spec(self, spec: Spec) -> Spec:
        stacked = mapped_spec(spec, self._repeated)
        if self.padding == "constant" and isinstance(stacked, Bounded):
            low, high = stacked.low.clamp(max=self.padding_value), stacked.high.clamp(min=self.padding_value)
            return Bounded(low, high, stacked.shape, stacked.dtype, stacked.device)
        return stacked

    def _repeated(self, value: np.ndarray) -> np.ndarray:
        return np.concatenate([value] * self.N, axis=self.dim)

    def _cut(self, values: np.ndarray, start: int, size: int) -> np.ndarray:
        """A view of `size` values along `dim`."""
        index: tuple[Any, ...] = (..., slice(start, start + size), *(slice(None),) * (-self.dim - 1))
        return values[index]


class CatTensors(Transform):
    """Concatenates several entries in one.

    Args:
        in_keys: entries to concatenate, in this order; a scalar has size 1.
        out_key: name of the new entry, which may be one of `in_keys`.
        dim: dim to concatenate along, counted from the end.
        del_keys: whether to remove the entries `in_keys`.
    """

    def __init__(self, in_keys: Keys, out_key: Key = "observation_vector", dim: int = -1, del_keys: bool = True):
        super().__init__(in_keys)
        if not self.in_keys:
            raise ConfigError("in_keys is empty; name the entries to concatenate")
        if dim >= 0:
            raise ConfigError(f"dim={dim} would depend on the env's batch size; count from the end, such as -1")
        self.out_keys = (out_key,)
        self.dim, self.del_keys = dim, del_keys
        self._key = out_key

    def prepare(self, env: EnvBase) -> None:
        leaves = env.observation_leaves()
        self._numbers = {key for key in self.in_keys if leaves[key].shape == env.batch_size}

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        values = [rows_of(value, mask) for value in self._values(source.observation)]
        target.observation[self._key][... if mask is None else mask] = np.concatenate(values, self.dim)

    def step(self, source: Frame, target: Frame) -> None:
        # The dtype follows torch: float32 and int64 give float32.
        np.concatenate(self._values(source.observation), self.dim, out=target.observation[self._key])

    def transform_observation_spec(self, spec: Composite) -> Composite:
        leaves = spec.leaves()
        parts = {key: leaves[key] for key in self.in_keys}
        for key in self.in_keys if self.del_keys else ():
            del spec[key]
        spec[self._key] = self._joined(parts)
        return spec

    def _joined(self, parts: dict[Key, Spec]) -> Spec:
        try:
            like = torch.cat(self._values({key: part.zero() for key, part in parts.items()}), self.dim)
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{key!r} {list(part.shape)}" for key, part in parts.items())
            raise ConfigError(f"CatTensors cannot concatenate {shapes} along dim={self.dim}: {error}") from error
        bounded = {key: part for key, part in parts.items() if isinstance(part, Bounded)}
        if len(bounded) < len(parts):
            return Unbounded(like.shape, like.dtype, like.device)
        low = torch.cat(self._values({key: part.low for key, part in bounded.items()}), self.dim)
        high = torch.cat(self._values({key: part.high for key, part in bounded.items()}), self.dim)
        return Bounded(low, high, like.shape, like.dtype, like.device)

    def _values(self, entries: Mapping[Key, _Value]) -> list[_Value]:
        return [entries[key][..., None] if key in self._numbers else entries[key] for key in self.in_keys]
