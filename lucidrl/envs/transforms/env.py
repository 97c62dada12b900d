"""TransformedEnv: an env with transforms."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from lucidrl.envs.arrays import FLAGS, Arrays, Frame, Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.specs import Composite
from lucidrl.envs.transforms.base import Compose, Transform, transforms_of
from lucidrl.errors import ConfigError
from lucidrl.profiling.ranges import profiled

_STEP, _RESET = 0, 1


@dataclass(frozen=True, slots=True)
class _Chain:
    """The frames that a TransformedEnv derives from one of its frames, for every transform."""

    env: EnvBase
    """The innermost env."""
    frame: Frame
    """The frame that the innermost env writes."""
    stages: list[tuple[Transform, Frame, Frame]]
    """Every transform with its source and target frame, innermost first."""
    transformed: list[Key]
    """Entries that the innermost env does not write."""


class TransformedEnv(EnvBase):
    """An env with transforms, itself an env.

        env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))

    Several transforms become nested TransformedEnvs with one transform each, so each transform has an env to read from;
    a step runs through all transforms in one loop. The innermost env writes directly into the output frame, except for
    entries that a transform changes or removes.

    Args:
        env: the env to wrap; `close` closes it too.
        transform: a transform, or a Compose of at least one.
    """

    def __init__(self, env: EnvBase, transform: Transform | Compose):
        super().__init__(device=env.device, batch_size=env.batch_size)
        self.base_env = env
        self.transform = transform
        self.num_seeds = env.num_seeds
        self._is_batch = env.batch_size.numel() > 1
        transforms = transforms_of(transform)
        if not transforms:
            raise ConfigError("the Compose is empty; give at least one transform")
        *inner, outermost = transforms
        self._put_around(TransformedEnv(env, Compose(*inner)) if inner else env, outermost)

    def append_transform(self, transform: Transform | Compose) -> None:
        """Add a transform around the existing ones.

        Call this before the env is passed to a collector. Do not pass a `Frame` to the env afterwards that `new_frame`
        returned before this call: it does not have the entries of the new transform.
        """
        for each in transforms_of(transform):
            below = copy.copy(self)
            self._put_around(below, each)
            self.transform = Compose(below.transform, each)

    def _put_around(self, below: EnvBase, transform: Transform) -> None:
        if transform.parent is not None:
            raise ConfigError(f"this {type(transform).__name__} already belongs to an env; make another, or clone() it")
        if transform.steps_env and self._is_batch:
            name, batch = type(transform).__name__, list(self.batch_size)
            raise ConfigError(
                f"{name} cannot step single envs of a batch of {batch}; apply it in the factory of each env"
            )
        _check_keys(transform, below)
        transform.prepare(below)
        self.observation_spec: Composite = transform.transform_observation_spec(below.observation_spec.clone())
        self.reward_spec = transform.transform_reward_spec(below.reward_spec)
        self.action_spec = transform.transform_action_spec(below.action_spec)
        transform.parent = below
        self._below, self._outermost = below, transform
        # A step and the reset after it are in use at the same time.
        self._changed = (self._new_changed(), self._new_changed())
        self._chain_keys = (object(), object())

    def _new_changed(self) -> Arrays:
        """Allocate the entries of the frame below that the transform changes or removes; `out` cannot share them."""
        shared = {*self.observation_leaves(), "reward", *FLAGS} - set(self._outermost.out_keys)
        return {key: array for key, array in self._below.new_frame().arrays().items() if key not in shared}

    @profiled("TransformedEnv._reset")
    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        chain = self._chain(out, _RESET)
        chain.env._reset_into(chain.frame, mask)
        for transform, source, target in chain.stages:
            transform.reset(source, target, mask)

    @profiled("TransformedEnv._step")
    def _step_into(self, actions: Arrays, out: Frame) -> None:
        chain = self._chain(out, _STEP)
        for transform, _, _ in reversed(chain.stages):
            actions = transform.before_step(actions)
        chain.env._step_into(actions, chain.frame)
        for transform, source, target in chain.stages:
            transform.step(source, target)

    def _step_and_reset_into(self, actions: Arrays, next_: Frame, root: Frame) -> None:
        if not self._is_batch:
            super()._step_and_reset_into(actions, next_, root)
            return
        # Step and reset a batch together, which saves ParallelEnv a round trip to its processes.
        ended = self._step_and_begin(actions, next_, root)
        if next_.done.any():
            if ended.any():
                self._reset_transforms(root, ended[..., 0])
            cut_off = next_.done & ~ended  # a transform ended the episode; the innermost env has not reset
            if cut_off.any():
                self._reset_into(root, cut_off[..., 0])

    @profiled("TransformedEnv._step")
    def _step_and_begin(self, actions: Arrays, next_: Frame, root: Frame) -> np.ndarray:
        """Step, and reset the innermost env; return where the innermost env ended an episode, bool [*B, 1]."""
        ending, beginning = self._chain(next_, _STEP), self._chain(root, _RESET)
        for transform, _, _ in reversed(ending.stages):
            actions = transform.before_step(actions)
        ending.env._step_and_reset_into(actions, ending.frame, beginning.frame)
        ended = next_.done.copy()
        for transform, source, target in ending.stages:
            transform.step(source, target)
        for key in beginning.transformed:
            root.observation[key][...] = next_.observation[key]
        return ended

    @profiled("TransformedEnv._reset")
    def _reset_transforms(self, root: Frame, mask: np.ndarray) -> None:
        """Reset the transforms after a reset of the innermost env."""
        for transform, source, target in self._chain(root, _RESET).stages:
            transform.reset(source, target, mask)

    def _set_seed(self, seed: int) -> None:
        self._below.set_seed(seed)
        self._outermost.set_seed(seed)

    def _close(self) -> None:
        self._below.close()

    def _chain(self, out: Frame, role: int) -> _Chain:
        chain = out.derived.get(self._chain_keys[role])
        if chain is None:
            # The frame below shares the arrays that the transform does not change.
            arrays = {**out.arrays(), **self._changed[role]}
            below = self._below.observation_leaves()
            source = Frame.of({key: arrays[key] for key in (*below, "reward", *FLAGS)})
            if isinstance(self._below, TransformedEnv):
                inner = self._below._chain(source, role)
            else:
                inner = _Chain(self._below, source, [], [])
            written = inner.frame.observation
            chain = out.derived[self._chain_keys[role]] = _Chain(
                inner.env,
                inner.frame,
                [*inner.stages, (self._outermost, source, out)],
                [key for key, array in out.observation.items() if written.get(key) is not array],
            )
        return chain


def _check_keys(transform: Transform, env: EnvBase) -> None:
    """Raise ConfigError if the transform reads a key that the env lacks, or adds a key that the env has."""
    name = type(transform).__name__
    there: set[Key] = {*env.observation_leaves(), "reward"}
    for key in transform.in_keys:
        if key not in there:
            raise ConfigError(f"{name} reads {key!r}, but the env has {_listed(there)}; fix in_keys")
    for key in transform.in_keys_inv:
        if key not in env.action_keys:
            raise ConfigError(
                f"{name} changes the action {key!r}, but the env has {_listed(set(env.action_keys))}; fix in_keys_inv"
            )
    for key in transform.out_keys:
        if key in there and key not in transform.in_keys:
            raise ConfigError(f"{name} writes {key!r}, which the env already has; choose another key")


def _listed(keys: set[Key]) -> str:
    return ", ".join(sorted(repr(key) for key in keys))
