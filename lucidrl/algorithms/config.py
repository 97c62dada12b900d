"""Configuration of the algorithms."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from lucidrl.losses.config import ClippedPGConfig, Coefficient
from lucidrl.utils.config import Config


class AdvantageEstimator(StrEnum):
    """What a reward is compared with; see `lucidrl.algorithms.advantages` for the formulas."""

    GROUP_NORMALIZED = "group_normalized"
    LEAVE_ONE_OUT = "leave_one_out"
    PLAIN = "plain"


class AdvantageConfig(Config):
    """How rewards become advantages."""

    estimator: AdvantageEstimator = AdvantageEstimator.GROUP_NORMALIZED
    """group_normalized: distance from the group's mean in standard deviations; leave_one_out: distance from the mean
    of the group's other rows; plain: distance from the mean of the whole batch."""


class GRPOConfig(Config):
    """Group-relative policy optimization."""

    max_steps: PositiveInt = 100
    """Training steps of the run; each collects once and trains on what was collected."""
    loss: ClippedPGConfig = ClippedPGConfig()
    """The objective."""
    advantages: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    drop_groups_without_signal: bool = False
    """Leave groups whose rewards are all equal out of the loss, and out of its mean: their advantages are zero, so
    they would only cost time and dilute the others. With a KL penalty or an entropy bonus they have a say."""
    mask_truncated: bool = False
    """Leave answers that were cut at the token limit out of the loss: their reward says little about them."""


class SFTConfig(Config):
    """Supervised fine-tuning."""

    max_steps: PositiveInt = 100
    """Training steps of the run."""
    examples_per_step: PositiveInt = 64
    """Conversations in one step."""


class PPOConfig(Config):
    """Proximal policy optimization of a control policy."""

    max_steps: PositiveInt = 100
    """Training steps of the run; each collects a batch of frames and goes over it several times."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.99
    """What a reward one frame later is worth now."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """How far advantages look ahead: 0 trusts the critic after one frame, 1 sums up rewards to the end."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """A ratio of new to old probability beyond 1 ± clip earns nothing more."""
    entropy_coefficient: Coefficient = 0.0
    """Weight of the entropy bonus, which keeps the policy from deciding too soon."""
    num_epochs: PositiveInt = 10
    """How many times a step goes over its frames."""
    minibatch_frames: PositiveInt = 256
    """Frames of one optimizer step."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1."""


class ValidationSchedule(Config):
    """When the policy is validated."""

    every: NonNegativeInt = 20
    """Steps between validations, beside those before the first and after the last step; 0 = only those two."""

    def is_due(self, step: int, max_steps: int) -> bool:
        return step in (0, max_steps) or (self.every > 0 and step % self.every == 0)


class ValidationConfig(ValidationSchedule):
    """How well the policy does on prompts that it is not trained on."""

    num_prompts: NonNegativeInt = 256
    """Held-out prompts to ask, each once and greedily; 0 turns validation off."""
    prompts_per_batch: PositiveInt = 64
    """Prompts completed together. A run that is asked to stop finishes the batch, and skips the rest."""


class ControlValidationConfig(ValidationSchedule):
    """How well a control policy does when it does not explore."""

    num_episodes: NonNegativeInt = 20
    """Episodes to play greedily, with the same seeds each time; 0 turns validation off."""
    max_episode_frames: PositiveInt = 10_000
    """A longer episode counts as far as it came."""
