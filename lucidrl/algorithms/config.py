"""Configuration of losses and advantages (free of torch, so that a config is read and checked at once)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from lucidrl.utils.config import Config

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ClippedPGConfig(Config):
    """Clipped policy gradient: the objective of PPO, GRPO and their relatives for language models."""

    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """A ratio below 1 - clip_low earns nothing more for a bad token."""
    clip_high: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2
    """A ratio above 1 + clip_high earns nothing more for a good token; more than clip_low keeps exploration alive."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Also bounds what a bad token can cost, at this ratio (3 is usual); unset leaves it unbounded."""
    ratio_level: Literal["token", "sequence"] = "token"
    """One ratio for each token, or one for each sequence: the geometric mean of its tokens' (needs smaller clips)."""
    normalization: Literal["token", "sequence"] = "token"
    """Mean over all valid tokens, or over valid sequences of each one's token mean (long answers weigh no more)."""
    kl_coefficient: Coefficient = 0.0
    """Weight of the divergence from the reference policy; 0 does not read `reference_policy_logprobs`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log(policy / reference): k1 = d, k2 = d²/2, k3 = exp(-d) + d - 1. The gradient of k1 averages to zero
    on policy, so k1 only shifts the loss; k2 and k3 pull towards the reference."""
    entropy_coefficient: Coefficient = 0.0
    """Weight of the entropy bonus; 0 does not compute the entropy."""
    importance_correction: Literal["none", "truncate", "mask"] = "none"
    """Weight tokens by exp(prev - generation log-probability), for generators that differ from the trainer: weights
    above the cap are cut to it, or their tokens give no policy gradient (and still count in the mean)."""
    importance_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Largest importance weight."""


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

    def is_scheduled(self, step: int, max_steps: int) -> bool:
        return step in (0, max_steps) or (self.every > 0 and step % self.every == 0)


class ValidationConfig(ValidationSchedule):
    """How well the policy does on prompts that it is not trained on."""

    num_prompts: NonNegativeInt = 256
    """Held-out prompts to ask, each once and greedily; 0 turns validation off."""

    def is_due(self, step: int, max_steps: int) -> bool:
        return self.num_prompts > 0 and self.is_scheduled(step, max_steps)


class ControlValidationConfig(ValidationSchedule):
    """How well a control policy does when it does not explore."""

    num_episodes: NonNegativeInt = 20
    """Episodes to play greedily, with the same seeds each time; 0 turns validation off."""
    max_episode_frames: PositiveInt = 10_000
    """A longer episode counts as far as it came."""

    def is_due(self, step: int, max_steps: int) -> bool:
        return self.num_episodes > 0 and self.is_scheduled(step, max_steps)
