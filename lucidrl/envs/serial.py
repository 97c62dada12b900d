"""Batches of envs: the base class, and SerialEnv, which steps its envs one after the other in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch

from lucidrl.envs.arrays import Arrays, Frame
from lucidrl.envs.base import MAX_SEED, EnvBase
from lucidrl.envs.creator import EnvFactory, env_creators, make_env
from lucidrl.envs.failures import env_failure
from lucidrl.envs.specs import Composite, Spec
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.profiling.ranges import profiled


@dataclass(frozen=True)
class EnvSpecs:
    """Shapes and specs of one env."""

    batch_size: torch.Size
    observation_spec: Composite
    action_spec: Spec | Composite
    reward_spec: Spec
    num_seeds: int

    @classmethod
    def of(cls, env: EnvBase) -> Self:
        return cls(
            batch_size=env.batch_size,
            observation_spec=env.observation_spec.to("cpu"),  # the envs of a batch may have different devices
            action_spec=env.action_spec.to("cpu"),
            reward_spec=env.reward_spec.to("cpu"),
            num_seeds=env.num_seeds,
        )


class StackedEnv(EnvBase):
    """A batch of envs with equal specs; env i is row i of every entry, and its seeds follow those of env i - 1.

    Args:
        first_index: index of the first env in errors.

    Raises:
        ConfigError: if the specs of the envs differ.
    """

    def __init__(self, specs: Sequence[EnvSpecs], *, first_index: int = 0, device: torch.device | str | None = None):
        check_alike(specs, lambda index: f"env {first_index + index}")
        one = specs[0]
        super().__init__(device=device, batch_size=(len(specs), *one.batch_size))
        self.num_envs = len(specs)
        self.observation_spec = one.observation_spec.expand(self.batch_size).to(self.device)
        self.action_spec = one.action_spec.expand((self.num_envs, *one.action_spec.shape)).to(self.device)
        self.reward_spec = one.reward_spec.expand((self.num_envs, *one.reward_spec.shape)).to(self.device)
        *self._seed_offsets, self.num_seeds = itertools.accumulate((spec.num_seeds for spec in specs), initial=0)

    def seeds_of_envs(self, seed: int) -> list[int]:
        """The first seed of each env if the batch has this `seed`."""
        return [(seed + offset) % (MAX_SEED + 1) for offset in self._seed_offsets]


def check_alike(specs: Sequence[EnvSpecs], name_of: Callable[[int], str]) -> None:
    """Raise ConfigError if the specs of an env differ from those of the first env; `num_seeds` may differ.

    Args:
        name_of: returns the name of an env in errors, from its index.
    """
    names = [field.name for field in fields(EnvSpecs) if field.name != "num_seeds"]
    for index, other in enumerate(specs):
        for name in names:
            expected, found = getattr(specs[0], name), getattr(other, name)
            if expected != found:
                other_name, first_name = name_of(index), name_of(0)
                raise ConfigError(f"{other_name} has {name} {found}, but {first_name} has {expected}; make them equal")


class SerialEnv(StackedEnv):
    """Envs that step in this process, one after the other; env i is row i of every entry.

        SerialEnv(8, lambda: GymEnv("CartPole-v1"))

    Args:
        num_workers: number of envs.
        create_env_fn: makes an env; or a list with one function per env.
        create_env_kwargs: arguments of the function; or a list with the arguments of each env.
        device: device of the TensorDicts.
        first_index: index of the first env in errors; above 0 in a process that runs some envs of a larger batch.

    Raises:
        ConfigError: if a factory does not return an env, or the specs of the envs differ.
        EnvironmentFailure: here and in every call, if an env raises; the message names index, seed and action.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str | None = None,
        first_index: int = 0,
    ):
        with ExitStack() as opened:
            self._envs = []
            for index, creator in enumerate(env_creators(num_workers, create_env_fn, create_env_kwargs)):
                self._envs.append(opened.enter_context(make_env(creator, first_index + index)))
            self.specs_of_envs = [EnvSpecs.of(env) for env in self._envs]
            super().__init__(self.specs_of_envs, first_index=first_index, device=device)
            opened.pop_all()
        self._first_index = first_index
        self.active_row = np.zeros(1, np.int64)
        """[1]: the row of the env that was called last; an env process replaces the array by one in shared memory."""

    @profiled("SerialEnv._reset")
    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        rows = out.rows()
        picked = range(self.num_envs) if mask is None else np.flatnonzero(mask.reshape(self.num_envs, -1).any(axis=1))
        try:
            for index in picked:
                self.active_row[0] = index
                part = None if mask is None or mask[index].all() else mask[index]
                self._envs[index]._reset_into(rows[index], part)
        except Exception as error:
            raise self._failure("reset", None, error) from error

    @profiled("SerialEnv._step")
    def _step_into(self, actions: Arrays, out: Frame) -> None:
        active_row, rows = self.active_row, out.rows()
        try:
            for index, env in enumerate(self._envs):
                active_row[0] = index
                env._step_into({key: array[index, ...] for key, array in actions.items()}, rows[index])
        except Exception as error:
            raise self._failure("step", actions, error) from error

    def _set_seed(self, seed: int) -> None:
        for env, env_seed in zip(self._envs, self.seeds_of_envs(seed), strict=True):
            env.set_seed(env_seed)

    def _close(self) -> None:
        with ExitStack() as closing:  # closes all envs, even if closing one raises
            for env in self._envs:
                closing.callback(env.close)

    def _failure(self, phase: str, actions: Arrays | None, error: Exception) -> EnvironmentFailure:
        row = int(self.active_row[0])
        row_actions = {key: array[row, ...] for key, array in (actions or {}).items()}
        return env_failure(self._first_index + row, self._envs[row].seed, phase, row_actions, error)
