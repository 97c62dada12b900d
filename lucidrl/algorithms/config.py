"""Settings of the algorithms."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from lucidrl.losses.config import ClippedPGConfig, Coefficient
from lucidrl.utils.config import Config

ALGORITHM_NAMES = ("grpo", "sft", "ppo")
"""The algorithms; each has a command and a section of settings with its name."""


class AdvantageEstimator(StrEnum):
    """Baseline that a reward is compared with; see `lucidrl.algorithms.advantages` for the formulas."""

    GROUP_NORMALIZED = "group_normalized"
    LEAVE_ONE_OUT = "leave_one_out"
    PLAIN = "plain"


class AdvantageConfig(Config):
    """How rewards become advantages."""

    estimator: AdvantageEstimator = AdvantageEstimator.GROUP_NORMALIZED
    """group_normalized: (reward - group mean) / group standard deviation (GRPO); leave_one_out: reward - mean of the
    group's other samples (RLOO); plain: reward - batch mean."""


class GRPOConfig(Config):
    """Group-relative policy optimization."""

    max_steps: PositiveInt = 100
    """Steps of the run; each collects rollouts once and trains on them."""
    num_epochs: PositiveInt = 1
    """Optimizer epochs over the rollouts of a step. From the second epoch on, the policy differs from the policy that
    sampled the rollouts, so ratios differ from 1 and clipping takes effect."""
    loss: ClippedPGConfig = ClippedPGConfig()
    """The loss."""
    advantages: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    drop_groups_without_signal: bool = False
    """Exclude groups with equal rewards from the loss and its mean. Their advantages are 0, so they only contribute to
    a KL penalty or an entropy bonus."""
    mask_truncated: bool = False
    """Exclude completions that were truncated at the token limit from the loss."""


class SFTConfig(Config):
    """Supervised fine-tuning."""

    max_steps: PositiveInt = 100
    """Steps of the run; see also `epochs`."""
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Passes over the training examples. If set, `max_steps` is computed from it and rounded up."""
    examples_per_step: PositiveInt = 64
    """Examples per step."""

    def for_examples(self, num_examples: int) -> SFTConfig:
        """Return a copy whose `max_steps` is computed from `epochs`; the config itself if `epochs` is None."""
        if self.epochs is None:
            return self
        steps = math.ceil(self.epochs * num_examples / self.examples_per_step)
        return self.model_copy(update={"max_steps": max(1, steps)})


class PPOConfig(Config):
    """Proximal policy optimization of a control policy."""

    max_steps: PositiveInt = 100
    """Steps of the run; each collects a batch of frames (env steps) and trains on it for several epochs."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount factor per frame (gamma)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalized advantage estimation: 0 uses the critic after one frame, 1 sums rewards to the end."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clip the ratio of the action's new and old probability to 1 ± clip."""
    entropy_coefficient: Coefficient = 0.0
    """Weight of the entropy bonus, which keeps the policy exploring."""
    num_epochs: PositiveInt = 10
    """Epochs over the frames of a step."""
    minibatch_frames: PositiveInt = 256
    """Frames per optimizer update."""
    normalize_advantages: bool = True
    """Normalize the advantages of a batch to mean 0 and standard deviation 1."""


class ValidationSchedule(Config):
    """When the policy is validated."""

    every: NonNegativeInt = 20
    """Steps between validations. The run also validates before the first and after the last step; 0 = only at these
    two points."""

    def is_due(self, step: int, max_steps: int) -> bool:
        return step in (0, max_steps) or (self.every > 0 and step % self.every == 0)


class ValidationConfig(ValidationSchedule):
    """Validation on held-out prompts."""

    num_prompts: NonNegativeInt = 256
    """Number of held-out prompts; 0 turns validation off."""
    samples_per_prompt: PositiveInt = 1
    """Completions per prompt. 1 decodes greedily; more are sampled, and add `pass_at_k`, `avg_at_k` and `maj_at_k` with
    their intervals to the metrics."""
    solved_at: float = Field(default=1.0, allow_inf_nan=False)
    """A completion is solved if its `accuracy` is at least this number, or its reward if there is no `accuracy`."""
    prompts_per_batch: PositiveInt = 64
    """Prompts per generated batch. A stop request takes effect between batches."""


class ControlValidationConfig(ValidationSchedule):
    """Validation of a control policy with greedy actions."""

    num_episodes: NonNegativeInt = 20
    """Episodes per validation, always with the same seeds; 0 turns validation off."""
    max_episode_frames: PositiveInt = 10_000
    """Frames after which an unfinished episode is stopped."""
