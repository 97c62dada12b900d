"""Several envs as one, stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from lucidrl.envs.arrays import Arrays, Frame
from lucidrl.envs.creator import EnvFactory, env_creators, make_env
from lucidrl.envs.failures import env_failure
from lucidrl.envs.stacked import EnvSpecs, StackedEnv
from lucidrl.errors import EnvironmentFailure
from lucidrl.profiling.ranges import profiled


class SerialEnv(StackedEnv):
    """Envs that step in this process, one after the other; env i is row i of every entry.

        SerialEnv(8, lambda: GymEnv("CartPole-v1"))

    Args:
        num_workers: number of envs.
        create_env_fn: makes an env; or a list with a function per env.
        create_env_kwargs: arguments of the function; or a list per env.
        device: device of the TensorDicts.
        first_index: number of the first env in errors, if a process runs a part of more envs.

    Raises:
        ConfigError: if a factory does not return an env, or the specs of the envs differ.
        EnvironmentFailure: here and in every call, if an env raises; names its index, seed and action.
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
        """[1]: the row of the env that was called last; an env process puts shared memory here."""

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
        with ExitStack() as closing:  # closes the others if one raises
            for env in self._envs:
                closing.callback(env.close)

    def _failure(self, phase: str, actions: Arrays | None, error: Exception) -> EnvironmentFailure:
        row = int(self.active_row[0])
        row_actions = {key: array[row, ...] for key, array in (actions or {}).items()}
        return env_failure(self._first_index + row, self._envs[row].seed, phase, row_actions, error)
