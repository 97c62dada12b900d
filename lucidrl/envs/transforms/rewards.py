"""Transforms of the reward alone."""

from __future__ import annotations

import math

import numpy as np

from lucidrl.envs.specs import Bounded, Spec
from lucidrl.envs.transforms.base import Transform
from lucidrl.envs.transforms.specs import mapped_spec
from lucidrl.errors import ConfigError


class RewardScaling(Transform):
    """Makes the reward `reward * scale + loc`, or with `standard_normal` `(reward - loc) / scale`."""

    def __init__(self, loc: float, scale: float, *, standard_normal: bool = False):
        super().__init__(in_keys=["reward"])
        if not math.isfinite(loc) or not math.isfinite(scale) or scale == 0:
            raise ConfigError(
                f"loc={loc}, scale={scale} would leave nothing of a reward; give finite ones, scale not 0"
            )
        self.loc, self.scale, self.standard_normal = float(loc), float(scale), standard_normal

    def forward(self, value: np.ndarray) -> np.ndarray:
        return (value - self.loc) / self.scale if self.standard_normal else value * self.scale + self.loc

    def transform_spec(self, spec: Spec) -> Spec:
        return mapped_spec(spec, self.forward)


class RewardClipping(Transform):
    """Keeps the reward between two limits; None leaves a side open."""

    def __init__(self, clamp_min: float | None = None, clamp_max: float | None = None):
        super().__init__(in_keys=["reward"])
        self.clamp_min = -math.inf if clamp_min is None else float(clamp_min)
        self.clamp_max = math.inf if clamp_max is None else float(clamp_max)
        if not self.clamp_min < self.clamp_max:
            raise ConfigError(
                f"clamp_min={clamp_min} is not below clamp_max={clamp_max}; every reward would be the same"
            )

    def forward(self, value: np.ndarray) -> np.ndarray:
        return np.clip(value, np.float32(self.clamp_min), np.float32(self.clamp_max))

    def transform_spec(self, spec: Spec) -> Spec:
        limited = (
            spec if isinstance(spec, Bounded) else Bounded(-math.inf, math.inf, spec.shape, spec.dtype, spec.device)
        )
        return mapped_spec(limited, self.forward)
