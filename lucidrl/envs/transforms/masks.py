"""Masks of discrete actions.

Shapes: n the number of discrete actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lucidrl.envs.arrays import Arrays, Frame, Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.specs import Categorical, Composite, OneHot, Spec
from lucidrl.envs.transforms.base import Transform
from lucidrl.errors import ConfigError, EnvironmentFailure


class ActionMask(Transform):
    """Restricts actions to those that the env's current mask allows.

    `action_spec` samples and accepts only allowed actions; a step with a masked action raises. The mask is an entry of
    the observation with one bool or 0/1 per action. Put the transform around a batch of envs, not around each env.
    """

    def __init__(self, action_key: Key = "action", mask_key: Key = "action_mask"):
        super().__init__()
        self.action_key, self.mask_key = action_key, mask_key

    def prepare(self, env: EnvBase) -> None:
        entries, spec = env.observation_leaves(), env.action_leaves().get(self.action_key)
        if self.mask_key not in entries:
            raise ConfigError(
                f"ActionMask reads {self.mask_key!r}, but the env has {', '.join(map(repr, entries))}; set mask_key"
            )
        if not isinstance(spec, Categorical | OneHot):
            raise ConfigError(
                f"ActionMask needs a discrete spec for {self.action_key!r}, but the env has {env.action_spec}; remove "
                "ActionMask, or use an env with discrete actions"
            )
        shape = (*spec.shape, spec.n) if isinstance(spec, Categorical) else tuple(spec.shape)
        if entries[self.mask_key].shape != shape:
            found = list(entries[self.mask_key].shape)
            raise ConfigError(
                f"the mask {self.mask_key!r} has shape {found}, but the action spec {spec} needs {list(shape)}; "
                "return a mask of that shape from the env"
            )
        self._mask = np.ones(shape, bool)
        masked: Any = _MaskedCategorical if isinstance(spec, Categorical) else _MaskedOneHot
        self._spec: Spec = masked(spec, self._mask)

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        rows = ... if mask is None else mask
        self._mask[rows] = source.observation[self.mask_key][rows]

    def step(self, source: Frame, target: Frame) -> None:
        self._mask[...] = source.observation[self.mask_key]

    def before_step(self, actions: Arrays) -> Arrays:
        action = actions[self.action_key]
        if not self._spec.contains(action):
            masked = f"{self.action_key!r} {action.tolist()} is masked by {self.mask_key!r}"
            raise EnvironmentFailure(f"{masked} {self._mask.astype(int).tolist()}; fix the policy")
        return actions

    def transform_action_spec(self, spec: Spec | Composite) -> Spec | Composite:
        if not isinstance(spec, Composite):
            return self._spec
        masked = spec.clone()
        masked[self.action_key[1:]] = self._spec  # without the leading "action"
        return masked


class _Masked(Spec):
    """A discrete spec that allows only the values of a mask; the mask changes in every step."""

    def __init__(self, spec: Any, mask: np.ndarray):
        super().__init__(spec.n, spec.shape, spec.dtype, spec.device)  # type: ignore[call-arg] # the init of the other base class
        self._mask = mask

    def expand(self, *shape: Any) -> Any:
        raise ConfigError("an env with ActionMask cannot be part of a batch; put ActionMask around the batch")


class _MaskedCategorical(_Masked, Categorical):
    """An index that the mask [*shape, n] allows."""

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        return _drawn(self._mask, rng).astype(self.numpy_dtype)

    def _allows(self, array: np.ndarray) -> bool:
        return super()._allows(array) and bool(np.take_along_axis(self._mask, array[..., None], -1).all())


class _MaskedOneHot(_Masked, OneHot):
    """A one-hot vector that the mask [*shape] allows."""

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        return self._one_hot(_drawn(self._mask, rng)[..., None])

    def _allows(self, array: np.ndarray) -> bool:
        return super()._allows(array) and bool(self._mask[array.astype(bool)].all())


def _drawn(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a random allowed index for every row of the mask [..., n]."""
    if not mask.any(-1).all():
        raise EnvironmentFailure(
            f"the action mask {mask.astype(int).tolist()} allows no action; the env must end the episode when no "
            "action is left"
        )
    return np.asarray(np.where(mask, rng.random(mask.shape), -1.0).argmax(-1))
