"""The recipe for control tasks: from the configuration of a run to its parts, connected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.table import Table

from lucidrl.algorithms.episodes import EpisodeCounter
from lucidrl.algorithms.evaluation import Evaluator
from lucidrl.algorithms.loop import Watcher
from lucidrl.algorithms.ppo import PPO
from lucidrl.collectors.single import Collector
from lucidrl.envs.base import EnvBase
from lucidrl.envs.gym import GymEnv
from lucidrl.envs.serial import SerialEnv
from lucidrl.envs.specs import Bounded, OneHot, Unbounded
from lucidrl.errors import ConfigError
from lucidrl.models.control.interfaces import ActionSpace, ContinuousActions, DiscreteActions, ObservationSpace
from lucidrl.models.control.policy import ControlPolicy
from lucidrl.recipes.control_configs import ControlEnvConfig, PPORunConfig
from lucidrl.recipes.episode_tape import EpisodeTape, EpisodeTapes
from lucidrl.recipes.parts import RunParts, check_run_can_start
from lucidrl.recipes.recipe import Recipe
from lucidrl.utils.imports import import_user_module

if TYPE_CHECKING:
    import gymnasium

VALIDATION_SEED = 1_000_000_007
"""Of the first episode of every validation, whatever the seed of the run."""


def run_ppo(config: PPORunConfig, folder: Path, watcher: Watcher, resume: bool = False) -> int:
    """Run PPO in a run folder; returns the last completed step."""
    with ExitStack() as stack:
        parts = RunParts(config, folder, stack, watcher, resume)
        env, tapes = make_envs(config.env, config.env.num_envs)
        stack.callback(env.close)
        policy = ControlPolicy(*spaces_of(env, config.env.name), config.policy, config.critic)
        collector = Collector(
            env,
            policy.network,
            frames_per_batch=config.collector.frames_per_batch,
            policy_device=policy.device,
            # Far from the seeds of other runs: envs take those that follow.
            seed=int(np.random.SeedSequence(config.seed).generate_state(1)[0]),
        )
        loop = PPO(
            config=config.ppo,
            validation=config.validation,
            policy=policy,
            collector=collector,
            envs=tapes,
            episodes=EpisodeCounter(config.env.num_envs),
            evaluator=_evaluator(config, policy, stack),
            logger=parts.logger,
            saver=parts.saver(policy),
            watcher=watcher,
        )
        parts.restore(policy, loop)
        return loop.run()


def make_envs(config: ControlEnvConfig, num_envs: int) -> tuple[EnvBase, EpisodeTapes]:
    """Envs that step together, and the tapes that put them back into the middle of their episodes."""
    tapes = [EpisodeTape(_gymnasium_env(config)) for _ in range(num_envs)]
    return SerialEnv(num_envs, [partial(GymEnv, tape.taped_env()) for tape in tapes]), EpisodeTapes(tapes)


def _gymnasium_env(config: ControlEnvConfig) -> gymnasium.Env:
    import gymnasium

    module_name, colon, _ = config.name.partition(":")
    if colon:
        import_user_module(module_name)
    try:
        # Our own checks are cheaper than gymnasium's checker and take its place.
        return gymnasium.make(config.name, **{"disable_env_checker": True, **config.kwargs})
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(f"gymnasium does not make env.name={config.name!r}: {error}") from error
    except Exception as error:  # of the env's own code
        raise ConfigError(
            f"env.name={config.name!r} cannot be made with env.kwargs={config.kwargs}: {type(error).__name__}: {error}"
        ) from error


def spaces_of(env: EnvBase, name: str) -> tuple[ObservationSpace, ActionSpace]:
    """What networks have to know of a batch of envs.

    Raises:
        ConfigError: if they are not made for such observations or actions.
    """
    observations, action = env.observation_spec.leaves(), env.action_spec
    if list(observations) != ["observation"]:
        raise ConfigError(
            f"env.name={name!r} observes {', '.join(map(str, observations))}, but the networks read a single array; "
            "register an env with gymnasium.wrappers.FlattenObservation around it"
        )
    space = ObservationSpace(tuple(observations["observation"].shape[1:]))
    if isinstance(action, OneHot):
        return space, DiscreteActions(action.shape[-1])
    if isinstance(action, Bounded) and action.dtype.is_floating_point:
        return space, ContinuousActions(action.low[0], action.high[0])
    if isinstance(action, Unbounded) and action.dtype.is_floating_point:
        limit = torch.full(action.shape[1:], torch.inf)
        return space, ContinuousActions(-limit, limit)
    raise ConfigError(
        f"env.name={name!r} takes actions of {action}, but the policy gives one choice or an array of real numbers; "
        "choose an env with a Discrete or Box action space"
    )


def _evaluator(config: PPORunConfig, policy: ControlPolicy, stack: ExitStack) -> Evaluator | None:
    if config.validation.num_episodes == 0:
        return None
    env = SerialEnv(config.validation.num_episodes, lambda: GymEnv(_gymnasium_env(config.env)))
    stack.callback(env.close)
    return Evaluator(env, policy.greedy, policy.device, VALIDATION_SEED, config.validation.max_episode_frames)


@dataclass(frozen=True)
class ControlPreflight:
    """What a check found."""

    observations: ObservationSpace
    actions: ActionSpace
    num_parameters: dict[str, int]
    """By role."""

    def table(self) -> Table:
        table = Table("env and networks", "", box=None, pad_edge=False)
        table.add_row("observation", f"{list(self.observations.shape)} numbers")
        table.add_row("action", _described(self.actions))
        for role, count in self.num_parameters.items():
            table.add_row(f"parameters of the {role}", f"{count:,}")
        return table


def preflight(config: PPORunConfig) -> ControlPreflight:
    """Check run folder, trackers, env, networks and optimizers.

    Raises:
        LucidError: for the first thing that would stop the run.
    """
    check_run_can_start(config)
    env, _ = make_envs(config.env, num_envs=1)
    with env:
        observations, actions = spaces_of(env, config.env.name)
    policy = ControlPolicy(observations, actions, config.policy, config.critic)
    networks = {"policy": policy.network, "critic": policy.critic}
    counts = {role: sum(p.numel() for p in network.parameters()) for role, network in networks.items()}
    return ControlPreflight(observations, actions, counts)


def _described(actions: ActionSpace) -> str:
    if isinstance(actions, DiscreteActions):
        return f"one of {actions.n}"
    return f"{list(actions.low.shape)} numbers from {actions.low.min():g} to {actions.high.max():g}"


def _default_preset(overrides: Sequence[str]) -> str | None:
    """`cartpole` is for CartPole; another env stands on the defaults."""
    names = [text.partition("=")[2] for text in overrides if text.startswith("env.name=")]
    return "cartpole" if not names or names[-1] == "CartPole-v1" else None


PPO_RECIPE = Recipe(
    name="ppo",
    schema=PPORunConfig,
    default_preset=_default_preset,
    preflight=preflight,
    run=run_ppo,
    validated_on="greedy",
    next_commands=lambda config, folder: [],
)
