"""Transforms that normalise by statistics: fixed, measured beforehand, or running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from lucidrl.envs.arrays import Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.specs import Spec, Unbounded
from lucidrl.envs.transforms.base import Keys, State, Transform
from lucidrl.errors import CheckpointError, ConfigError


class ObservationNorm(Transform):
    """Computes `value * scale + loc`, or with `standard_normal` `(value - loc) / scale`.

    Args:
        loc: number or array that broadcasts to each entry; without it and `scale`, call `init_stats`.
        scale: the same.
        standard_normal: `loc` and `scale` are mean and standard deviation of the entry.
    """

    def __init__(
        self,
        loc: Any = None,
        scale: Any = None,
        in_keys: Keys = ("observation",),
        out_keys: Keys | None = None,
        *,
        standard_normal: bool = False,
    ):
        super().__init__(in_keys, out_keys)
        if (loc is None) != (scale is None):
            raise ConfigError(f"loc={loc}, scale={scale}: give both, or none and call init_stats")
        self.standard_normal = standard_normal
        self._stats: dict[Key, tuple[np.ndarray, np.ndarray]] = {}
        for key in self.in_keys if loc is not None else ():
            self._set_stats(key, loc, scale)

    def init_stats(self, num_iter: int, *, reduce_dim: int | Sequence[int] = 0, eps: float = 1e-6) -> None:
        """Measure mean and standard deviation over `num_iter` random steps of the env; reset it afterwards.

        Args:
            reduce_dim: dims of [frames of all envs, *shape of the entry] to reduce; (0, -1, -2) keeps the channels of
                an image.
            eps: minimum standard deviation.
        """
        if self.parent is None:
            raise ConfigError("ObservationNorm has no env; put it into a TransformedEnv before init_stats")
        frames = self.parent.rollout(num_iter, break_when_any_done=False)
        num_dims = len(self.parent.batch_size) + 1
        dims = (reduce_dim,) if isinstance(reduce_dim, int) else tuple(reduce_dim)
        for key in self.in_keys:
            values = frames[key].flatten(end_dim=num_dims - 1).double().cpu().numpy()
            mean = values.mean(dims, keepdims=True)[0]
            std = np.maximum(values.std(dims, keepdims=True)[0], eps)
            self._set_stats(key, *((mean, std) if self.standard_normal else (-mean / std, 1 / std)))

    def forward_entry(self, key: Key, value: np.ndarray) -> np.ndarray:
        if key not in self._stats:
            raise ConfigError(f"ObservationNorm has no loc and scale for {key!r}; give them, or call init_stats")
        dtype = _float_of(value.dtype)
        value, (loc, scale) = value.astype(dtype), (stat.astype(dtype) for stat in self._stats[key])
        return (value - loc) / scale if self.standard_normal else value * scale + loc

    def transform_spec(self, spec: Spec) -> Spec:
        return _float_spec(spec)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {
            f"{_name(key)}.{name}": stat.copy()
            for key, stats in self._stats.items()
            for name, stat in zip(("loc", "scale"), stats, strict=True)
        }

    def load_state_dict(self, state: State) -> None:
        for key in self.in_keys:
            self._set_stats(key, *(_taken(state, key, name) for name in ("loc", "scale")))

    def _set_stats(self, key: Key, loc: Any, scale: Any) -> None:
        loc, scale = np.array(loc, np.float64), np.array(scale, np.float64)
        if not np.isfinite(loc).all() or not np.isfinite(scale).all() or (scale == 0).any():
            raise ConfigError(f"loc={loc}, scale={scale} of {key!r} must be finite, and scale not 0")
        self._stats[key] = loc, scale


class VecNorm(Transform):
    """Computes `(value - mean) / std` with running statistics over all steps and envs, the current step included.

    For evaluation use `frozen_copy()`. Around a batch of envs the statistics are of all envs; in a worker process, of
    its envs alone.

    Args:
        in_keys: "reward" can be one.
        decay: factor on the weight of earlier steps; 1 weighs all steps equally, 0.999 about the last thousand.
        eps: added to the variance.
    """

    def __init__(
        self,
        in_keys: Keys = ("observation",),
        out_keys: Keys | None = None,
        *,
        decay: float = 1.0,
        eps: float = 1e-4,
    ):
        super().__init__(in_keys, out_keys)
        if not 0 < decay <= 1:
            raise ConfigError(f"decay={decay} must be above 0 and at most 1")
        if not eps > 0:
            raise ConfigError(f"eps={eps} must be above 0")
        self.decay, self.eps = decay, eps
        self.frozen = False
        """Whether the statistics stay as they are."""
        self._stats: dict[Key, _Running] = {}

    def frozen_copy(self) -> Self:
        """A copy with fixed statistics."""
        twin = self.clone()
        twin.frozen = True
        return twin

    def prepare(self, env: EnvBase) -> None:
        for key in self.in_keys:
            spec = env.reward_spec if key == "reward" else env.observation_leaves()[key]
            shape = spec.shape[len(env.batch_size) :]
            if key not in self._stats:
                self._stats[key] = _Running(shape)
            elif self._stats[key].mean.shape != shape:
                learned = list(self._stats[key].mean.shape)
                raise ConfigError(f"VecNorm learned {key!r} of shape {learned}, but here it has {list(shape)}")

    def forward_entry(self, key: Key, value: np.ndarray) -> np.ndarray:
        stats = self._stats[key]
        if not self.frozen:
            stats.learn(value, self.decay)
        normal = (value - stats.mean) / np.sqrt(stats.variance() + self.eps)
        return normal.astype(_float_of(value.dtype), copy=False)

    def transform_spec(self, spec: Spec) -> Spec:
        return _float_spec(spec)

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{_name(key)}.{name}": value
            for key, stats in self._stats.items()
            for name, value in (
                ("weight", stats.weight),
                ("mean", stats.mean.copy()),
                ("squares", stats.squares.copy()),
            )
        }

    def load_state_dict(self, state: State) -> None:
        for key in self.in_keys:
            weight, mean, squares = (_taken(state, key, name) for name in ("weight", "mean", "squares"))
            stats = _Running(np.shape(mean))
            stats.weight = float(weight)
            stats.mean[...], stats.squares[...] = mean, squares
            if key in self._stats and self._stats[key].mean.shape != stats.mean.shape:
                shapes = f"{list(stats.mean.shape)}, but here it is {list(self._stats[key].mean.shape)}"
                raise CheckpointError(f"the state has {_name(key)} of shape {shapes}; load it into the same env")
            self._stats[key] = stats


class _Running:
    """Running mean and variance with decay."""

    def __init__(self, shape: Sequence[int]):
        self.weight = 0.0
        """Effective number of values."""
        self.mean = np.zeros(shape)
        self.squares = np.zeros(shape)
        """Sum of squared deviations from the mean."""

    def learn(self, values: np.ndarray, decay: float) -> None:
        """Add values [..., *shape], without differences of large sums."""
        rows = values.reshape(-1, *self.mean.shape).astype(np.float64)
        number = len(rows)
        mean = rows.sum(0) / number
        old = self.weight * decay
        self.weight = old + number
        difference = mean - self.mean
        self.mean += difference * (number / self.weight)
        self.squares *= decay
        self.squares += difference * difference * (old * number / self.weight)
        if number > 1:
            self.squares += np.square(rows - mean).sum(0)

    def variance(self) -> np.ndarray:
        return self.squares / max(self.weight, 1.0)


def _float_of(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.kind == "f" else np.dtype(np.float32)


def _float_spec(spec: Spec) -> Spec:
    return Unbounded(spec.shape, spec.dtype if spec.dtype.is_floating_point else torch.float32, spec.device)


def _name(key: Key) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _taken(state: State, key: Key, name: str) -> Any:
    path = f"{_name(key)}.{name}"
    if path not in state:
        raise CheckpointError(f"the state has {', '.join(state) or 'nothing'}, but no {path}; load another one")
    return state[path]
