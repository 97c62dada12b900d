"""Configuration of control runs: an env of gymnasium, a policy and a critic."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, model_validator

from lucidrl.algorithms.config import ControlValidationConfig, PPOConfig
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.recipes.configs import Arithmetic, BaseRunConfig, NumThreads
from lucidrl.utils.config import Config


class ControlEnvConfig(Config):
    """The task."""

    name: str = "CartPole-v1"
    """Id of an environment of gymnasium; `module:Id` imports the module that registers it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`."""
    num_envs: PositiveInt = 8
    """Environments that are stepped together, one after the other in this process."""


class FrameCollectorConfig(Config):
    """How much is collected before each training step."""

    frames_per_batch: PositiveInt = 2048
    """Frames of a step, of all environments together."""


class PPORunConfig(BaseRunConfig):
    """`lucidrl ppo`"""

    num_threads: NumThreads | None = 1
    """CPU threads of the computation; null lets torch decide. More than one only wait for each other in small networks.
    Results depend on it in the last bits."""
    ppo: PPOConfig = PPOConfig()
    """The algorithm."""
    policy: ControlPolicyConfig = ControlPolicyConfig()
    """The network that decides."""
    critic: CriticConfig = CriticConfig()
    """The network that estimates what an observation is worth."""
    env: ControlEnvConfig = ControlEnvConfig()
    """The task."""
    collector: FrameCollectorConfig = FrameCollectorConfig()
    """How much is collected before each training step."""
    validation: ControlValidationConfig = ControlValidationConfig()
    """Episodes without exploration."""

    @property
    def max_steps(self) -> int:
        return self.ppo.max_steps

    @property
    def title(self) -> str:
        return f"policy and critic on {self.env.name}"

    def arithmetic(self) -> Arithmetic:
        frames, minibatch = self.collector.frames_per_batch, self.ppo.minibatch_frames
        num_updates = self.ppo.num_epochs * frames // minibatch
        return [
            ("frames a step", frames, "collector.frames_per_batch"),
            ("frames of each env", frames // self.env.num_envs, "frames a step / env.num_envs"),
            ("frames an optimizer step", minibatch, "ppo.minibatch_frames"),
            ("optimizer steps a step", num_updates, "ppo.num_epochs x frames a step / frames an optimizer step"),
            ("frames of the run", frames * self.ppo.max_steps, "frames a step x ppo.max_steps"),
        ]

    @model_validator(mode="after")
    def _frames_divide(self) -> PPORunConfig:
        frames = self.collector.frames_per_batch
        for key, count in (("env.num_envs", self.env.num_envs), ("ppo.minibatch_frames", self.ppo.minibatch_frames)):
            if frames % count:
                raise ValueError(
                    f"collector.frames_per_batch={frames} does not split into {key}={count}; make it a multiple"
                )
        return self
