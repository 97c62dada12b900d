"""Elementwise transforms: dtype, scale, limits."""

from __future__ import annotations

import math

import numpy as np
import torch

from lucidrl.envs.arrays import Arrays, Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.specs import Bounded, Composite, Spec
from lucidrl.envs.transforms.base import Keys, Transform, as_keys, mapped_spec
from lucidrl.errors import ConfigError


class DoubleToFloat(Transform):
    """Casts float64 entries to float32, and float32 actions to float64.

    Args:
        in_keys: entries of the observation; None for all that are float64.
        in_keys_inv: entries of the action; None for all that are float64.
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
            # The float32 next to a limit may be beyond it.
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
                raise ConfigError(f"DoubleToFloat reads {key!r}, which is {leaves[key].dtype}, not float64; remove it")
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
