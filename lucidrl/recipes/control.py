"""Runs of control policies: create envs, networks, collector and algorithm from the settings.

A resume continues unfinished episodes by replay: it restores the env's random generator to its state at the last reset
and repeats the actions since then. An env that draws only from its own generator reaches the same state, bit for bit.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table

from lucidrl.algorithms.ppo import PPO, EpisodeCounter
from lucidrl.algorithms.validation import EpisodeValidator
from lucidrl.collectors.single import Collector
from lucidrl.envs.base import EnvBase
from lucidrl.envs.gym import GymEnv
from lucidrl.envs.serial import SerialEnv
from lucidrl.envs.specs import Bounded, OneHot, Unbounded
from lucidrl.errors import ConfigError
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.models.control.interfaces import ActionSpace, ContinuousActions, DiscreteActions, ObservationSpace
from lucidrl.models.control.policy import ControlPolicy
from lucidrl.recipes.configs import ControlEnvConfig, PPORunConfig
from lucidrl.recipes.training_run import RunParts, TrainingRun, check_run_can_start, checkpoint_on_disk
from lucidrl.utils.imports import import_user_module
from lucidrl.utils.random_state import seed_everything

if TYPE_CHECKING:
    import gymnasium

log = logging.getLogger(__name__)

VALIDATION_SEED = 1_000_000_007
"""Seed of the first validation episode, in every run."""


class PPORun(TrainingRun[PPORunConfig]):
    """`lucidrl ppo`"""

    @cached_property
    def _envs(self) -> tuple[EnvBase, list[EpisodeTape]]:
        seed_everything(self.config.seed)  # their constructors may draw random numbers
        return make_envs(self.config.env, self.config.env.num_envs)

    @cached_property
    def _spaces(self) -> tuple[ObservationSpace, ActionSpace]:
        return spaces_of(self._envs[0], self.config.env.name)

    def preflight(self) -> Table:
        """Check run folder, trackers, envs, networks and optimizers."""
        config = self.config
        check_run_can_start(config)
        observations, actions = self._spaces
        policy = ControlPolicy(observations, actions, *_networks(config))
        num_policy, num_critic = (sum(p.numel() for p in net.parameters()) for net in (policy.network, policy.critic))
        table = Table("env and networks", "", box=None, pad_edge=False)
        table.add_row("observation", f"{list(observations.shape)} numbers")
        table.add_row("action", _described(actions))
        table.add_row("parameters of the policy", f"{num_policy:,}")
        table.add_row("parameters of the critic", f"{num_critic:,}")
        networks = (num_policy, config.policy), (num_critic, config.critic)
        table.add_row("checkpoint on disk", checkpoint_on_disk(config, *networks))
        return table

    def _prepare(self, stack: ExitStack) -> None:
        _ = self._envs

    def _build(self, parts: RunParts) -> PPO:
        config, (env, tapes) = self.config, self._envs
        policy = ControlPolicy(*self._spaces, *_networks(config))
        collector = Collector(
            env,
            policy.network,
            frames_per_batch=config.collector.frames_per_batch,
            policy_device=policy.device,
            # A hash, so that runs with close seeds do not share env seeds, which are consecutive.
            seed=int(np.random.SeedSequence(config.seed).generate_state(1)[0]),
        )
        return PPO(
            config=config.ppo,
            loop=parts.loop(policy, _validator(config, policy, parts.stack)),
            policy=policy,
            collector=collector,
            envs=tapes,
            episodes=EpisodeCounter(config.env.num_envs),
        )

    def next_commands(self, folder: Path) -> list[list[str]]:
        return [["lucidrl", "play", str(folder)]]

    def close(self) -> None:
        if "_envs" in vars(self):
            self._envs[0].close()


def _networks(config: PPORunConfig) -> tuple[ControlPolicyConfig, CriticConfig]:
    steps = config.max_steps
    return config.policy.with_total_steps(steps), config.critic.with_total_steps(steps)


def make_envs(config: ControlEnvConfig, num_envs: int) -> tuple[EnvBase, list[EpisodeTape]]:
    """Return envs that step together, and the tapes that replay their episodes after a resume."""
    tapes = [EpisodeTape(gymnasium_env(config)) for _ in range(num_envs)]
    return SerialEnv(num_envs, [partial(GymEnv, tape.taped_env()) for tape in tapes]), tapes


def gymnasium_env(config: ControlEnvConfig) -> gymnasium.Env:
    import gymnasium

    module_name, colon, _ = config.name.partition(":")
    if colon:
        import_user_module(module_name)
    try:
        # Our own checks replace gymnasium's checker and cost less.
        return gymnasium.make(config.name, **{"disable_env_checker": True, **config.kwargs})
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(
            f"gymnasium cannot create env.name={config.name!r}: {error}; check id and env.kwargs"
        ) from error
    except Exception as error:  # raised by the env's own code
        raise ConfigError(
            f"env.name={config.name!r} cannot be created with env.kwargs={config.kwargs}: "
            f"{type(error).__name__}: {error}"
        ) from error


def spaces_of(env: EnvBase, name: str) -> tuple[ObservationSpace, ActionSpace]:
    """Return the spaces of a batch of envs; raise ConfigError if the networks do not support them."""
    observations, action = env.observation_spec.leaves(), env.action_spec
    if list(observations) != ["observation"]:
        raise ConfigError(
            f"env.name={name!r} has the observations {', '.join(map(str, observations))}, but the networks read a "
            "single array; register the env with gymnasium.wrappers.FlattenObservation around it"
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
        f"env.name={name!r} has the action space {action}, but the policy supports one discrete action or an array of "
        "real numbers; choose an env with a Discrete or Box action space"
    )


def _validator(config: PPORunConfig, policy: ControlPolicy, stack: ExitStack) -> EpisodeValidator | None:
    if config.validation.num_episodes == 0:
        return None
    env = SerialEnv(config.validation.num_episodes, lambda: GymEnv(gymnasium_env(config.env)))
    stack.callback(env.close)
    return EpisodeValidator(env, policy.greedy, policy.device, VALIDATION_SEED, config.validation.max_episode_frames)


def _described(actions: ActionSpace) -> str:
    if isinstance(actions, DiscreteActions):
        return f"one of {actions.n}"
    return f"{list(actions.low.shape)} numbers from {actions.low.min():g} to {actions.high.max():g}"


class EpisodeTape:
    """Records what is needed to replay the current episode of a gymnasium env."""

    def __init__(self, env: gymnasium.Env):
        self._env = env
        self._seed: int | None = None
        """The last seed passed to `reset`."""
        self._generator: Mapping[str, Any] | None = None
        """State of the env's random generator before the last reset; None if that reset had a seed or none happened."""
        self._actions: list[np.ndarray] = []
        self._observation: Any = None
        self._resumed: Mapping[str, Any] | None = None
        """The episode that the next reset replays."""

    def taped_env(self) -> gymnasium.Env:
        """Return the env with this tape around its resets and steps."""
        import gymnasium

        wrapper: Any = gymnasium.Wrapper(self._env)
        wrapper.reset, wrapper.step = self.reset, self.step
        return wrapper

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; after `load_state_dict`, continue the saved one."""
        if self._resumed is not None:
            resumed, self._resumed = self._resumed, None
            return self._replay(resumed)
        if seed is None:
            self._generator = _generator_state(self._env)
        else:
            self._seed, self._generator = seed, None
        self._actions = []
        self._observation, info = self._env.reset(seed=seed, options=options)
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._actions.append(np.array(action))
        result = self._env.step(action)
        self._observation = result[0]
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the episode so far, as plain values."""
        return {
            "seed": self._seed,
            "generator": self._generator,
            "actions": [action.tolist() for action in self._actions],
            "observation": _digest(self._observation),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed = state

    def _replay(self, saved: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        observation, info = self.reset(seed=saved["seed"])
        if saved["generator"] is not None:
            self._env.unwrapped.np_random.bit_generator.state = saved["generator"]
            observation, info = self.reset()
        for action in saved["actions"]:
            observation, _, terminated, truncated, info = self.step(np.array(action, self._env.action_space.dtype))
            if terminated or truncated:
                log.warning(
                    "the replayed episode of %s ended before the saved step; a new episode begins",
                    self._env,
                )
                return self.reset()
        if _digest(observation) != saved["observation"]:
            log.warning("%s is not deterministic: the resumed run will differ from an uninterrupted one", self._env)
        return observation, info


def _generator_state(env: gymnasium.Env) -> Any:
    """State of the env's generator as plain values; None if `np_random` is not a `numpy.random.Generator`."""
    generator = env.unwrapped.np_random
    return _plain(generator.bit_generator.state) if isinstance(generator, np.random.Generator) else None


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _digest(observation: Any) -> str:
    return hashlib.blake2b(np.asarray(observation).tobytes(), digest_size=16).hexdigest()
