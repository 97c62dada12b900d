"""Several envs as one, stepped one after the other."""

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
        num_workers: how many envs.
        create_env_fn: makes an env; or a list with one function for each.
        create_env_kwargs: what it is called with; or a list for each.
        device: of the TensorDicts at the edge.
        first_index: what errors call the first env, if these are part of a larger set.

    Raises:
        ConfigError: if a factory returns no env, or envs with different specs.
        EnvironmentFailure: here and in every call, if an env raises; with its index, seed and action.
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
        self.at_work = np.zeros(1, np.int64)
        """[1]: the row of the env that was called last; who watches from another process replaces it by shared
        memory."""

    @profiled("SerialEnv._reset")
    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        rows = out.rows()
        picked = range(self.num_envs) if mask is None else np.flatnonzero(mask.reshape(self.num_envs, -1).any(axis=1))
        try:
            for index in picked:
                self.at_work[0] = index
                part = None if mask is None or mask[index].all() else mask[index]
                self._envs[index]._reset_into(rows[index], part)
        except Exception as error:
            raise self._failure("reset", None, error) from error

    @profiled("SerialEnv._step")
    def _step_into(self, actions: Arrays, out: Frame) -> None:
        at_work, rows = self.at_work, out.rows()
        try:
            for index, env in enumerate(self._envs):
                at_work[0] = index
                env._step_into({key: array[index, ...] for key, array in actions.items()}, rows[index])
        except Exception as error:
            raise self._failure("step", actions, error) from error

    def _set_seed(self, seed: int) -> None:
        for env, env_seed in zip(self._envs, self.seeds_of_envs(seed), strict=True):
            env.set_seed(env_seed)

    def _close(self) -> None:
        with ExitStack() as closing:  # one that raises does not keep the others open
            for env in self._envs:
                closing.callback(env.close)

    def _failure(self, phase: str, actions: Arrays | None, error: Exception) -> EnvironmentFailure:
        row = int(self.at_work[0])
        row_actions = {key: array[row, ...] for key, array in (actions or {}).items()}
        return env_failure(self._first_index + row, self._envs[row].seed, phase, row_actions, error)
