"""The base of SerialEnv and ParallelEnv: several envs as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch

from lucidrl.envs.base import MAX_SEED, EnvBase
from lucidrl.envs.specs import Composite, Spec
from lucidrl.errors import ConfigError


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
            observation_spec=env.observation_spec.to("cpu"),  # the devices of stacked envs may differ
            action_spec=env.action_spec.to("cpu"),
            reward_spec=env.reward_spec.to("cpu"),
            num_seeds=env.num_seeds,
        )


class StackedEnv(EnvBase):
    """Envs with equal specs; env i is row i of every entry, and uses the seeds after those of env i - 1.

    Args:
        first_index: number of the first env in errors.

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
        """The first seed of each env for a `seed` of the whole."""
        return [(seed + offset) % (MAX_SEED + 1) for offset in self._seed_offsets]


def check_alike(specs: Sequence[EnvSpecs], name_of: Callable[[int], str]) -> None:
    """Raise ConfigError if the specs of an env differ from those of the first; the number of seeds may differ.

    Args:
        name_of: names an env in errors, by its index.
    """
    names = [field.name for field in fields(EnvSpecs) if field.name != "num_seeds"]
    for index, other in enumerate(specs):
        for name in names:
            expected, found = getattr(specs[0], name), getattr(other, name)
            if expected != found:
                other_name, first_name = name_of(index), name_of(0)
                raise ConfigError(f"{other_name} has {name} {found}, but {first_name} has {expected}; make them equal")
