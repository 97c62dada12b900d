"""Configuration of rewards: reward functions by import path, and verifiers by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, FiniteFloat, PositiveInt, model_validator

from lucidrl.errors import ConfigError
from lucidrl.rewards.interfaces import LLM_JUDGE, MEMORY_LIMIT_MB, REWARD_MODEL, TIMEOUT_S, Limits, SampleTime
from lucidrl.rewards.verifiers import VERIFIERS
from lucidrl.utils.config import Config, validate

REWARD_ENV = "lucidrl.rewards.env:RewardEnv"
"""The environment of a run with `reward`."""
TOOL_ENV = "lucidrl.tools.env:ToolEnv"
"""The environment of a run with `reward` and `tools`."""
_OF_VERIFIERS = ("memory_limit_mb", "num_workers", "on_crash", "on_parse_failure", "on_timeout", "timeout_s")
_NOT_OF_MODELS = ("memory_limit_mb", "num_workers", "on_parse_failure", "on_timeout")
_OF_POOLS = ("memory_limit_mb", "num_workers", "on_timeout", "timeout_s")
JUDGE_TIMEOUT_S = 120.0
JUDGE_OUTCOMES = {"on_timeout": "drop", "on_crash": "fail", "on_parse_failure": "drop"}
"""Defaults of the LLM judge: its failures say nothing about the completion, so they do not become scores."""
MODEL_TIMEOUT_S = 600.0
MODEL_OUTCOMES = {"on_crash": "drop"}
"""Defaults of a reward model: a score of 0 would mean something else for every model."""

OutcomeReward = FiniteFloat | Literal["fail", "drop"]
"""What a verification without a score counts as: a number is the score, `fail` stops the run, `drop` leaves the
sample out."""


class RewardConfig(Config):
    """A reward function or verifier, with its weight in the reward."""

    name: str
    """Name of a verifier, such as `math`, import path of your function, `module:function`, or `model:FOLDER`."""
    weight: FiniteFloat = 1.0
    """Factor of the score in the reward, which is the sum of weight times score."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier, or values for parameters of the function."""
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)
    """Timeout per completion of a verifier that runs in a pool, from the start of that verification; default: 5. Code
    that the verifier `code` runs gets 80 % of it. Of the LLM judge: timeout of all requests for one completion;
    default: 120. Of a reward model: timeout per batch; default: 600. For a function, set `env.timeout_s`."""
    num_workers: PositiveInt | None = None
    """Completions that the pool of the verifier verifies at the same time; default: the number of cores."""
    memory_limit_mb: Annotated[int, Field(ge=16)] | None = None
    """Memory limit of one verification in a pool, and of each process of code that it runs; default: 1024."""
    on_timeout: OutcomeReward = 0.0
    """Score of a completion whose verification timed out: a number, `fail` (stop the run) or `drop` (leave the sample
    out). The metric `reward/<name>/timeout` counts timeouts."""
    on_crash: OutcomeReward = 0.0
    """As `on_timeout`, for a verification that raised or ended its process; the metric `reward/<name>/crash` counts
    these."""
    on_parse_failure: OutcomeReward = 0.0
    """As `on_timeout`, for a completion that has nothing to verify, for example no number; the metric
    `reward/<name>/parse_failure` counts these."""

    @property
    def is_function(self) -> bool:
        """Whether `name` is the import path of a function, not a verifier or a reward model."""
        return ":" in self.name and self.model_folder is None

    @property
    def model_folder(self) -> str | None:
        """The folder of a reward model; None for other rewards."""
        return self.name.removeprefix(REWARD_MODEL) if self.name.startswith(REWARD_MODEL) else None

    @property
    def limits(self) -> Limits:
        """Limits of one verification in a pool."""
        return Limits(self.timeout_s or TIMEOUT_S, (self.memory_limit_mb or MEMORY_LIMIT_MB) << 20)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_models(cls, content: Any) -> Any:
        name = content.get("name") if isinstance(content, Mapping) else None
        if isinstance(name, str) and name.startswith(REWARD_MODEL):
            return {**MODEL_OUTCOMES, **content}
        return {**JUDGE_OUTCOMES, **content} if name == LLM_JUDGE else content

    @model_validator(mode="after")
    def _only_settings_with_effect(self) -> Self:
        entry = VERIFIERS.get(self.name)
        if self.name == LLM_JUDGE and (self.num_workers or self.memory_limit_mb):
            raise ValueError(
                "the LLM judge runs no processes, so num_workers and memory_limit_mb would have no effect; "
                "set kwargs.max_concurrency instead"
            )
        if self.model_folder is not None and (names := self._changed(_NOT_OF_MODELS)):
            raise ValueError(
                f"reward {self.name} is a reward model, so {names} would have no effect, as only verifiers use it; "
                "remove it"
            )
        if self.is_function and (names := self._changed(_OF_VERIFIERS)):
            raise ValueError(
                f"reward {self.name} is a function, so {names} would have no effect, as only verifiers use it; "
                "set env.timeout_s, env.num_workers or env.on_error instead"
            )
        if entry is not None and not entry.runs_in_pool and (names := self._changed(_OF_POOLS)):
            raise ValueError(
                f"verifier {self.name} runs in the environment's process, so {names} would have no effect, as only "
                "verifiers in a pool use it; remove it"
            )
        if entry is not None:
            for name in self.kwargs.keys() & set(_OF_VERIFIERS) - entry.config.model_fields.keys():
                problem = f"kwargs.{name}={self.kwargs[name]!r} is not an option of verifier {self.name}"
                raise ValueError(f"{problem}, but {name} is a setting of the reward; set it beside kwargs")
        return self

    def _changed(self, names: Sequence[str]) -> str:
        """Those settings that differ from their defaults, with their values."""
        changed = {name: getattr(self, name) for name in names}
        defaults = type(self).model_fields
        return ", ".join(f"{name}={value}" for name, value in changed.items() if value != defaults[name].get_default())


class ModelRewardConfig(Config):
    """Options of a reward model, `reward=model:FOLDER`."""

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the model's computations."""
    tokens_per_batch: PositiveInt = 8192
    """Most tokens per forward pass; a sample with more tokens is not scored."""


_ALL_AT_ONCE = 1_000_000
"""Samples that a reward model scores within its timeout: those of one call."""


def as_named_list(value: Any) -> Any:
    """Convert a name, a mapping, or a list of names and mappings to a list of mappings."""
    if value is None:
        return []
    if isinstance(value, str | Mapping | Config):
        value = [value]
    if not isinstance(value, Sequence):
        return value
    return [{"name": item} if isinstance(item, str) else item for item in value]


Rewards = Annotated[tuple[RewardConfig, ...], BeforeValidator(as_named_list)]
"""The setting `reward`: a name, a mapping, or a list of names and mappings."""


def with_reward_env(cls: Any, content: Any) -> Any:
    """Validator of run configs: set `env.name` to `REWARD_ENV`, or `TOOL_ENV`, if the run has `reward`."""
    if not isinstance(content, Mapping) or not content.get("reward"):
        return content
    env = content.get("env", {})
    if not isinstance(env, Mapping):
        env = env.model_dump(exclude_unset=True) if isinstance(env, Config) else {}
    expected = TOOL_ENV if content.get("tools") else REWARD_ENV
    if (name := env.get("name", expected)) not in (REWARD_ENV, TOOL_ENV):
        raise ValueError(
            f"reward and env.name={name} are both set, but a run has one source of rewards; remove one of them"
        )
    if env.get("kwargs"):
        raise ValueError(
            f"env.kwargs={env['kwargs']} has no effect in a run with reward; set reward.kwargs instead, or remove it"
        )
    return {**content, "env": {**env, "name": expected}}


def task_title(config: Any) -> str:
    """Describe what a run trains on: the environment, or the data and its rewards."""
    data = config.data.title
    if not config.reward:
        return str(data or config.env.name)
    return f"{data or 'rows of a program'} with reward {', '.join(reward.name for reward in config.reward)}"


def check_fits_functions(env: Any, num_functions: int) -> None:
    """Raise ConfigError if settings of the environment exclude reward functions that are Python objects."""
    if env.num_workers > 1:
        raise ConfigError(
            f"env.num_workers={env.num_workers} needs reward functions by name, because function objects run in "
            "the process of this program; set reward=module:function, or remove env.num_workers"
        )
    if env.isolation == "process":
        raise ConfigError(
            "env.isolation=process needs reward functions by name, because function objects run in the process of this "
            "program; set reward=module:function, or remove env.isolation"
        )
    if env.kwargs:
        raise ConfigError(
            f"env.kwargs={env.kwargs} would have no effect, because {num_functions} reward functions score completions "
            "instead of an environment; remove env.kwargs, or the preset that sets it"
        )
    if env.name not in (type(env)().name, REWARD_ENV, TOOL_ENV):
        raise ConfigError(
            f"env.name={env.name} and {num_functions} reward functions exclude each other, because a run has one "
            "source of rewards; remove one of them"
        )


def env_kwargs(rewards: Sequence[RewardConfig]) -> dict[str, Any]:
    """Arguments of `REWARD_ENV`."""
    return {"rewards": [reward.model_dump() for reward in rewards]}


def seconds_per_sample(rewards: Sequence[RewardConfig]) -> list[SampleTime]:
    """Upper bound on the time that each verifier of a run needs per completion: every completion times out."""
    return [
        SampleTime(1 + verifier_timeout_s(reward), _num_at_once(reward)) for reward in rewards if not reward.is_function
    ]


def _num_at_once(reward: RewardConfig) -> int:
    """Completions that a verifier or LLM judge scores at the same time."""
    if reward.name == LLM_JUDGE:
        from lucidrl.rewards.judge.config import JudgeConfig

        return validate(JudgeConfig, dict(reward.kwargs), at="reward.kwargs").max_concurrency
    if reward.model_folder is not None:
        return _ALL_AT_ONCE
    entry = VERIFIERS.get(reward.name)
    if entry is None or not entry.runs_in_pool:
        return 1
    from lucidrl.distributed.workers.process import num_cores

    return reward.num_workers or num_cores()


def verifier_timeout_s(reward: RewardConfig) -> float:
    """Timeout per completion of a verifier or LLM judge, or per batch of a reward model."""
    if reward.model_folder is not None:
        return reward.timeout_s or MODEL_TIMEOUT_S
    return reward.timeout_s or (JUDGE_TIMEOUT_S if reward.name == LLM_JUDGE else TIMEOUT_S)


def unique_names(names: Sequence[str]) -> list[str]:
    """Make names unique for metrics: a repeated name gets a number, as in regex, regex_2."""
    found: list[str] = []
    for name in names:
        number, unique = 1, name
        while unique in found:
            number += 1
            unique = f"{name}_{number}"
        found.append(unique)
    return found


class _Settings(Config):
    """Holds only the setting `reward`, so that validation errors name the setting."""

    reward: Rewards
    """As in the settings of a run."""


def rewards_of(settings: Any) -> tuple[RewardConfig, ...]:
    """Validate the setting `reward`: a name, a mapping, or a list of names and mappings.

    Raises:
        ConfigError: the setting is invalid; the message lists all problems.
    """
    return validate(_Settings, {"reward": settings}).reward
