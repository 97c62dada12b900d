"""Transforms of numbers: dtype, scale, limits, and normalisation by fixed, measured or running statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from lucidrl.envs.arrays import Arrays, Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.specs import Bounded, Composite, Spec, Unbounded
from lucidrl.envs.transforms.base import Keys, State, Transform, as_keys, mapped_spec
from lucidrl.errors import CheckpointError, ConfigError


class DoubleToFloat(Transform):
    """Casts float64 entries to float32, and float32 actions to float64.

    Args:
        in_keys: entries of the observation; None for all float64 entries.
        in_keys_inv: entries of the action; None for all float64 entries.
    """

    def __init__(self, in_keys: Keys | None = None, in_keys_inv: Keys | None = None):
        super().__init__(in_keys or (), in_keys_inv=in_keys_inv or ())
        self._given, self._given_inv = in_keys, in_keys_inv

    def prepare(self, env: EnvBase) -> None:
        actions = env.action_leaves()
        self.in_keys = self.out_keys = self._doubles(env.observation_leaves(), self._given)
        self.in_keys_inv = self._doubles(actions, self._given_inv)
        self._limits = {
            key: (spec.low.cpu().numpy(), spec.high.cpu().numpy())
            for key in self.in_keys_inv
            if isinstance(spec := actions[key], Bounded)
        }

    def forward(self, value: np.ndarray) -> np.ndarray:
        return value.astype(np.float32)

    def before_step(self, actions: Arrays) -> Arrays:
        doubles = {key: actions[key].astype(np.float64) for key in self.in_keys_inv}
        for key, (low, high) in self._limits.items():
            # The float32 nearest to a limit may be beyond the limit.
            np.clip(doubles[key], low, high, out=doubles[key])
        return actions | doubles

    def transform_spec(self, spec: Spec) -> Spec:
        return mapped_spec(spec, self.forward)

    def transform_action_spec(self, spec: Spec | Composite) -> Spec | Composite:
        if not isinstance(spec, Composite):
            return self.transform_spec(spec) if self.in_keys_inv else spec
        floats = spec.clone()
        for path in self.in_keys_inv:
            key = path[1:]  # without the leading "action"
            floats[key] = self.transform_spec(spec[key])
        return floats

    def _doubles(self, leaves: dict[Key, Spec], given: Keys | None) -> tuple[Key, ...]:
        if given is None:
            return tuple(key for key, spec in leaves.items() if spec.dtype == torch.float64)
        for key in as_keys(given):
            if leaves[key].dtype != torch.float64:
                problem = f"DoubleToFloat converts float64, but {key!r} is {leaves[key].dtype}"
                raise ConfigError(f"{problem}; remove {key!r} from the keys of the transform")
        return as_keys(given)


class RewardScaling(Transform):
    """Computes `reward * scale + loc`, or with `standard_normal` `(reward - loc) / scale`."""

    def __init__(self, loc: float, scale: float, *, standard_normal: bool = False):
        super().__init__(in_keys=["reward"])
        if not math.isfinite(loc) or not math.isfinite(scale) or scale == 0:
            raise ConfigError(f"loc={loc}, scale={scale} must be finite, and scale not 0")
        self.loc, self.scale, self.standard_normal = float(loc), float(scale), standard_normal

    def forward(self, value: np.ndarray) -> np.ndarray:
        return (value - self.loc) / self.scale if self.standard_normal else value * self.scale + self.loc

    def transform_spec(self, spec: Spec) -> Spec:
        return mapped_spec(spec, self.forward)


class RewardClipping(Transform):
    """Clips the reward to two limits; None for no limit."""

    def __init__(self, clamp_min: float | None = None, clamp_max: float | None = None):
        super().__init__(in_keys=["reward"])
        self.clamp_min = -math.inf if clamp_min is None else float(clamp_min)
        self.clamp_max = math.inf if clamp_max is None else float(clamp_max)
        if not self.clamp_min < self.clamp_max:
            raise ConfigError(f"clamp_min={clamp_min} must be below clamp_max={clamp_max}")

    def forward(self, value: np.ndarray) -> np.ndarray:
        return np.clip(value, np.float32(self.clamp_min), np.float32(self.clamp_max))

    def transform_spec(self, spec: Spec) -> Spec:
        limited = (
            spec if isinstance(spec, Bounded) else Bounded(-math.inf, math.inf, spec.shape, spec.dtype, spec.device)
        )
        return mapped_spec(limited, self.forward)


class ObservationNorm(Transform):
    """Computes `value * scale + loc`, or with `standard_normal` `(value - loc) / scale`.

    Args:
        loc: number or array that broadcasts to each entry. Without `loc` and `scale`, call `init_stats`.
        scale: number or array, likewise.
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
            raise ConfigError(f"loc={loc}, scale={scale}: give both, or neither and call init_stats")
        self.standard_normal = standard_normal
        self._stats: dict[Key, tuple[np.ndarray, np.ndarray]] = {}
        for key in self.in_keys if loc is not None else ():
            self._set_stats(key, loc, scale)

    def init_stats(self, num_iter: int, *, reduce_dim: int | Sequence[int] = 0, eps: float = 1e-6) -> None:
        """Measure mean and standard deviation over `num_iter` random steps of the env; reset the env afterwards.

        Args:
            reduce_dim: dims to reduce, of the values [frames of all envs, *shape of the entry]; (0, -1, -2) keeps the
                channels of an image.
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

    For evaluation use `frozen_copy()`. Around a batch of envs, the statistics are over all envs; inside a worker
    process of a batch, they are over the envs of that process.

    Args:
        in_keys: entries to normalise; "reward" can be one.
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
        """Whether the statistics are no longer updated."""
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
                raise ConfigError(
                    f"VecNorm learned {key!r} of shape {learned}, but the env has {list(shape)}; use the same shape"
                )

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
        """Add values [..., *shape]; the update avoids differences of large sums, which lose precision."""
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
        raise CheckpointError(
            f"the state has {', '.join(state) or 'nothing'}, but no {path}; load it into the transforms it was saved "
            "from"
        )
    return state[path]
