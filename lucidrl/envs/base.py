"""EnvBase: a TensorDict interface over preallocated arrays.

Shapes: B the env's batch size (none for a single env), T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from lucidrl.envs.arrays import FLAGS, Arrays, Frame, Key, copy_rows
from lucidrl.envs.failures import at_least_one
from lucidrl.envs.policies import as_policy
from lucidrl.envs.recorder import Recorder
from lucidrl.envs.specs import Categorical, Composite, Spec, Unbounded
from lucidrl.envs.specs.spec import cast_exactly
from lucidrl.envs.tensordicts import arrays_of, checked_entries, tensordict_of, write_step
from lucidrl.errors import ConfigError, DataError
from lucidrl.profiling.ranges import profiled

MAX_SEED = 2**32 - 1


def check_seed(seed: int) -> None:
    """Raise ConfigError for a seed that numpy does not accept."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed={seed} is not between 0 and {MAX_SEED}; choose another seed")


class EnvBase:
    """An environment, or a batch of them that step together.

    A subclass sets its specs and implements one of two pairs of hooks; the other pair then works too:

    - arrays: `_reset_into(out, mask)` and `_step_into(actions, out)` write into a `Frame`;
    - TensorDicts: `_reset(tensordict)` and `_step(tensordict)` return the new entries.

    All randomness of the hooks must come from the seed that `_set_seed` receives.

        class Countdown(EnvBase):
            def __init__(self):
                super().__init__()
                self.observation_spec = Composite(left=Unbounded((1,), torch.int64))
                self.action_spec = Bounded(1, 3, (1,), torch.int64)

            def _set_seed(self, seed): ...

            def _reset(self, tensordict):
                return TensorDict({"left": torch.tensor([21])})

            def _step(self, tensordict):
                left = tensordict["left"] - tensordict["action"]
                return TensorDict({"left": left, "reward": -torch.ones(1), "terminated": left <= 0})

    Args:
        device: device of the TensorDicts; the arrays are in host memory.
        batch_size: leading dims of every entry.
    """

    observation_spec: Composite
    """Spec of all entries that the env returns, except the reward and the flags done, terminated and truncated."""
    action_spec: Spec | Composite
    """Spec of the entry "action"."""
    num_seeds: int = 1
    """Number of consecutive seeds that the env uses."""

    def __init__(self, *, device: torch.device | str | None = None, batch_size: Sequence[int] = ()):
        self.batch_size = torch.Size(batch_size)
        self.device = torch.device("cpu" if device is None else device)
        self.reward_spec: Spec = Unbounded((*self.batch_size, 1), torch.float32, self.device)
        flag = Categorical(2, (*self.batch_size, 1), torch.bool, self.device)
        self.done_spec = Composite(dict.fromkeys(FLAGS, flag), shape=self.batch_size)
        self.seed: int | None = None
        """The seed of the last `set_seed`; None before."""
        self.is_closed = False
        self._rng = np.random.default_rng()
        self._root: Arrays | None = None
        self._has_tensordict_hooks = type(self)._step_into is EnvBase._step_into
        if self._has_tensordict_hooks and type(self)._step is EnvBase._step:
            raise TypeError(f"{type(self).__name__} implements neither _step_into nor _step; implement one")

    # ---- TensorDict interface

    @property
    def action_keys(self) -> list[Key]:
        return list(self.action_leaves())

    @profiled("EnvBase.reset")
    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDict:
        """Start new episodes; return observation and flags.

        Args:
            tensordict: if it has an entry `_reset`, a [*B] or [*B, 1] bool mask, reset only the envs of the mask; the
                result has the rows of `tensordict` for the other envs.
        """
        mask = None if tensordict is None else tensordict.get("_reset", None)
        frame = self.new_frame()
        if mask is None:
            self._reset_and_clear(frame, None)
        else:
            assert tensordict is not None
            copy_rows(arrays_of(tensordict, list(frame.observation)), frame.observation)
            flags = {name: array for name, array in frame.flags().items() if tensordict.get(name, None) is not None}
            copy_rows(arrays_of(tensordict, list(flags)), flags)
            self._partial_reset(frame, mask)
        return tensordict_of({**frame.observation, **frame.flags()}, self.batch_size, self.device)

    @profiled("EnvBase.step")
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply the action, write the result under "next" and return the same TensorDict."""
        result = self._step(tensordict)
        if self._has_tensordict_hooks:
            frame = self.new_frame()
            write_step(result, frame, type(self).__name__)
            result = self._next_of(frame)
        return tensordict.set("next", result)

    @profiled("EnvBase.step_and_maybe_reset")
    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDict]:
        """Apply the action, and reset the envs whose episode is done.

        Returns:
            The TensorDict with the step result under "next", and the root of the next step: the observation to act on.
        """
        return self._step_and_maybe_reset(tensordict)

    @profiled("EnvBase.rollout")
    def rollout(
        self,
        max_steps: int,
        policy: Any = None,
        *,
        break_when_any_done: bool = True,
        auto_reset: bool = True,
        tensordict: TensorDictBase | None = None,
    ) -> TensorDict:
        """Step the env; return [*B, T] frames, with T at most `max_steps`.

        Args:
            policy: see `as_policy`; None acts at random.
            break_when_any_done: stop when the first episode ends; otherwise reset the env and continue.
            auto_reset: start with a reset; otherwise continue from the root `tensordict`.
        """
        recorder = Recorder(self, at_least_one("max_steps", max_steps), "EnvBase.policy")
        if auto_reset:
            recorder.reset()
        elif tensordict is None:
            raise ConfigError("auto_reset=False needs tensordict=...; pass the TensorDict that reset() returned")
        else:
            self._set_root(tensordict)
            recorder.begin_with(arrays_of(tensordict, list(self.observation_leaves())))
        recorder.record(as_policy(policy, self), max_steps, until_done=break_when_any_done)
        return recorder.take().to(self.device)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Return a random action; if `tensordict` is not None, write the action into it."""
        actions = self.new_actions()
        self.sample_actions(actions)
        drawn = tensordict_of(actions, self.batch_size, self.device)
        return drawn if tensordict is None else tensordict.update(drawn)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Step with a random action."""
        return self.step(self.rand_action(tensordict))

    def set_seed(self, seed: int) -> int:
        """Seed the env, effective from the next reset; return the first seed that the env does not use."""
        check_seed(seed)
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self._set_seed(seed)
        return (seed + self.num_seeds) % (MAX_SEED + 1)

    def close(self) -> None:
        """Release resources; may be called twice."""
        if not self.is_closed:
            self.is_closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={list(self.batch_size)}, device={self.device})"

    # ---- array interface

    def new_frame(self) -> Frame:
        """A frame of this env, all zeros."""
        observation = {key: _zeros(spec) for key, spec in self.observation_leaves().items()}
        flags = (np.zeros((*self.batch_size, 1), bool) for _ in FLAGS)
        return Frame(observation, np.zeros((*self.batch_size, 1), np.float32), *flags)

    def new_actions(self) -> Arrays:
        """Arrays for the actions of this env, all zeros."""
        return {key: _zeros(spec) for key, spec in self.action_leaves().items()}

    def observation_leaves(self) -> dict[Key, Spec]:
        """Specs of the observation entries by key."""
        return self.observation_spec.leaves()

    def action_leaves(self) -> dict[Key, Spec]:
        """Specs of the action entries by key."""
        if isinstance(self.action_spec, Composite):
            return Composite({"action": self.action_spec}, shape=self.batch_size).leaves()
        return {"action": self.action_spec}

    def sample_actions(self, out: Arrays) -> None:
        """Write random actions into `out`, drawn from the env's seed."""
        for key, spec in self.action_leaves().items():
            out[key][...] = spec.sample(self._rng)

    @profiled("EnvBase.reset")
    def reset_into(self, out: Frame, mask: np.ndarray | None = None) -> None:
        """Reset the envs of the mask [*B], or all envs; other rows of `out` keep their values."""
        self._reset_and_clear(out, mask)

    @profiled("EnvBase.step")
    def step_into(self, actions: Arrays, out: Frame) -> None:
        """Apply actions and write all entries of the frame `out`."""
        self._step_into(actions, out)

    @profiled("EnvBase.step_and_maybe_reset")
    def step_and_reset_into(self, actions: Arrays, next_: Frame, root: Frame) -> None:
        """Write the step result into `next_`, and the observation to act on next into `root`: reset where done."""
        self._step_and_reset_into(actions, next_, root)

    # ---- hooks

    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        """Start new episodes and write their observations, in the rows of the mask or in all rows."""
        if mask is None:
            root = TensorDict({}, batch_size=self.batch_size, device=self.device)
        else:
            root = tensordict_of(self._root_arrays(), self.batch_size, self.device)
            root["_reset"] = torch.from_numpy(mask).to(self.device)
        observation = checked_entries(self._reset(root), out.observation, type(self).__name__)
        copy_rows(observation, out.observation, mask)
        copy_rows(observation, self._root_arrays(), mask)

    def _step_into(self, actions: Arrays, out: Frame) -> None:
        """Apply actions; write observation, reward and all flags."""
        root = tensordict_of({**self._root_arrays(), **actions}, self.batch_size, self.device)
        write_step(self._step(root), out, type(self).__name__)
        copy_rows(out.observation, self._root_arrays())

    def _step_and_reset_into(self, actions: Arrays, next_: Frame, root: Frame) -> None:
        self._step_into(actions, next_)
        for key, array in root.observation.items():
            array[...] = next_.observation[key]
        root.clear_flags()
        if not self.batch_size:
            if next_.done[0]:
                self._reset_into(root, None)
        elif next_.done.any():
            self._reset_into(root, next_.done[..., 0])

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the observation of new episodes.

        If `tensordict` has the mask `_reset`, start new episodes only in the envs of the mask. The result has a row for
        every env nevertheless; the caller reads the rows of the mask and discards the others.
        """
        frame = self.new_frame()
        self._reset_into(frame, None)
        return tensordict_of(frame.observation, self.batch_size, self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return observation, reward and flags after the action; of the flags, `done` or `terminated` is required."""
        frame = self.new_frame()
        self._step_into(self._actions_of(tensordict), frame)
        return self._next_of(frame)

    def _set_seed(self, seed: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not implement _set_seed; define it")

    def _close(self) -> None: ...

    # ---- conversions

    def _reset_and_clear(self, out: Frame, mask: np.ndarray | None) -> None:
        self._reset_into(out, mask)
        out.clear_flags(mask)

    def _step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDict]:
        next_, root = self.new_frame(), self.new_frame()
        self._set_root(tensordict)
        self._step_and_reset_into(self._actions_of(tensordict), next_, root)
        following = tensordict_of({**root.observation, **root.flags()}, self.batch_size, self.device)
        return tensordict.set("next", self._next_of(next_)), following

    def _partial_reset(self, frame: Frame, mask: torch.Tensor) -> None:
        if mask.dtype != torch.bool or tuple(mask.shape) not in (self.batch_size, (*self.batch_size, 1)):
            raise DataError(
                f"_reset is {mask.dtype} {list(mask.shape)}; give a bool mask of shape {list(self.batch_size)}"
            )
        rows = mask.cpu().numpy().reshape(self.batch_size)
        if self._has_tensordict_hooks:
            copy_rows(frame.observation, self._root_arrays())
        if not self.batch_size:
            if rows:
                self._reset_and_clear(frame, None)
        elif rows.any():
            self._reset_and_clear(frame, rows)

    def _set_root(self, tensordict: TensorDictBase) -> None:
        """Set the observation that an env with TensorDict hooks reads in its next step."""
        if self._has_tensordict_hooks:
            copy_rows(arrays_of(tensordict, list(self.observation_leaves())), self._root_arrays())

    def _root_arrays(self) -> Arrays:
        if self._root is None:
            self._root = self.new_frame().observation
        return self._root

    def _actions_of(self, tensordict: TensorDictBase) -> Arrays:
        actions = arrays_of(tensordict, self.action_keys)
        for key, spec in self.action_leaves().items():
            if actions[key].shape != tuple(spec.shape):
                raise DataError(f"{key} has shape {list(actions[key].shape)}; the env needs {list(spec.shape)}")
            try:
                actions[key] = cast_exactly(actions[key], spec.numpy_dtype)
            except ValueError as error:
                raise DataError(f"{key} does not fit {spec}: {error}") from error
        return actions

    def _next_of(self, frame: Frame) -> TensorDict:
        return tensordict_of(frame.arrays(), self.batch_size, self.device)


def _zeros(spec: Spec) -> np.ndarray:
    return np.zeros(tuple(spec.shape), spec.numpy_dtype)
