"""Configuration of rewards: reward functions by import path, and verifiers by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, FiniteFloat, PositiveInt, model_validator

from lucidrl.errors import ConfigError
from lucidrl.utils.config import Config, validate

REWARD_ENV = "lucidrl.rewards.env:RewardEnv"
"""The environment of a run with `reward`."""
TIMEOUT_S = 5.0
MEMORY_LIMIT_MB = 1024

OutcomeReward = FiniteFloat | Literal["fail", "drop"]
"""A number is the score of the completion; `fail` stops the run; `drop` leaves the sample out. All are counted."""


class RewardConfig(Config):
    """One part of the reward."""

    name: str
    """A verifier such as `math`, or `module:function` of yours."""
    weight: FiniteFloat = 1.0
    """Factor of its score in the reward."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the verifier, or values of parameters of the function."""
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)
    """Timeout of a verifier that runs in a pool, per completion, from the start of its verification; default: 5. For a
    function set `env.timeout_s`."""
    num_workers: PositiveInt | None = None
    """Completions that a verifier's pool verifies at the same time; default: the number of cores."""
    memory_limit_mb: Annotated[int, Field(ge=16)] | None = None
    """Memory of one verification in a pool; default: 1024."""
    on_timeout: OutcomeReward = 0.0
    """Score of a completion whose verification timed out: a number, `fail` (stop the run) or `drop` (leave the sample
    out). `reward/<name>/timeout` counts them."""
    on_crash: OutcomeReward = 0.0
    """Same for a verification that raised or ended its process; counted by `reward/<name>/crash`."""
    on_parse_failure: OutcomeReward = 0.0
    """Same for a completion without anything to verify, such as one without a number; counted by
    `reward/<name>/parse_failure`."""

    @property
    def is_function(self) -> bool:
        """Whether it is a function of the user."""
        return ":" in self.name

    @model_validator(mode="after")
    def _only_settings_with_effect(self) -> Self:
        if self.is_function:
            of_verifiers = {"timeout_s", "num_workers", "memory_limit_mb", "on_timeout", "on_crash", "on_parse_failure"}
            defaults = type(self).model_fields
            without_effect = [
                name for name in sorted(of_verifiers) if getattr(self, name) != defaults[name].get_default()
            ]
            if without_effect:
                raise ValueError(
                    f"{', '.join(without_effect)} of reward {self.name} has no effect, because it is a function and no "
                    "verifier; use env.timeout_s, env.num_workers and env.on_error"
                )
        return self


def _as_list(value: Any) -> Any:
    """A name, a mapping or a list of them, as a list of mappings."""
    if value is None:
        return []
    if isinstance(value, str | Mapping | RewardConfig):
        value = [value]
    if not isinstance(value, Sequence):
        return value
    return [{"name": item} if isinstance(item, str) else item for item in value]


Rewards = Annotated[tuple[RewardConfig, ...], BeforeValidator(_as_list)]
"""A name, a mapping, or a list of them."""


def with_reward_env(cls: Any, content: Any) -> Any:
    """Let the settings of a run with `reward` use the environment `REWARD_ENV`; a validator of run configs."""
    if not isinstance(content, Mapping) or not content.get("reward"):
        return content
    env = content.get("env", {})
    if not isinstance(env, Mapping):
        env = env.model_dump(exclude_unset=True) if isinstance(env, Config) else {}
    if (name := env.get("name", REWARD_ENV)) != REWARD_ENV:
        raise ValueError(
            f"reward and env.name={name} are both set, but a run has one source of rewards; remove one of them"
        )
    if env.get("kwargs"):
        raise ValueError(
            f"env.kwargs={env['kwargs']} has no effect in a run with reward; set reward.kwargs, or remove it"
        )
    return {**content, "env": {**env, "name": REWARD_ENV}}


def task_title(config: Any) -> str:
    """What a run trains on: the environment, or the data and what rewards it."""
    data = config.data.title
    if not config.reward:
        return str(data or config.env.name)
    return f"{data or 'rows of a program'} with reward {', '.join(reward.name for reward in config.reward)}"


def check_fits_functions(env: Any, num_functions: int) -> None:
    """Raise ConfigError if reward functions that are objects cannot be used with these settings of the environment."""
    if env.num_workers > 1:
        raise ConfigError(
            f"env.num_workers={env.num_workers} needs reward functions by name, because functions of this program run "
            "in its own process; set reward=module:function, or remove env.num_workers"
        )
    if ":" in env.name and env.name != REWARD_ENV:
        raise ConfigError(
            f"env.name={env.name} and {num_functions} reward functions are both given, but a run has one source of "
            "rewards; remove one of them"
        )


def env_kwargs(rewards: Sequence[RewardConfig]) -> dict[str, Any]:
    """Arguments of `REWARD_ENV`."""
    return {"rewards": [reward.model_dump() for reward in rewards]}


def seconds_per_sample(rewards: Sequence[RewardConfig]) -> float:
    """Most time that the verifiers of a run need per completion: the worst case of a step, in which all time out."""
    return sum((1 + (reward.timeout_s or TIMEOUT_S)) for reward in rewards if not reward.is_function)


def unique_names(names: Sequence[str]) -> list[str]:
    """Names for metrics: those that come again are numbered, as in regex, regex_2."""
    found: list[str] = []
    for name in names:
        number, unique = 1, name
        while unique in found:
            number += 1
            unique = f"{name}_{number}"
        found.append(unique)
    return found


class _Settings(Config):
    """The setting alone, to validate it by its name."""

    reward: Rewards
    """As in the settings of a run."""


def rewards_of(settings: Any) -> tuple[RewardConfig, ...]:
    """Rewards from a name, a mapping or a list of them.

    Raises:
        ConfigError: listing all problems.
    """
    return validate(_Settings, {"reward": settings}).reward
