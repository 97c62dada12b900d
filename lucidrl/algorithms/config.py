"""Settings of the algorithms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from lucidrl.algorithms.variants import Variant, with_bundle
from lucidrl.collectors.config import AsyncConfig
from lucidrl.losses.config import ClippedPGConfig, Coefficient, Divergence
from lucidrl.models.policy.config import DTensorConfig, PolicyConfig, Precision
from lucidrl.utils.config import Config

ALGORITHM_NAMES = ("grpo", "distill", "sft", "ppo")
"""The algorithms; each has a command and a section of settings with its name."""


class AdvantageEstimator(StrEnum):
    """Baseline that a reward is compared with; see `lucidrl.algorithms.advantages` for the formulas."""

    GROUP_NORMALIZED = "group_normalized"
    GROUP_CENTERED = "group_centered"
    LEAVE_ONE_OUT = "leave_one_out"
    PLAIN = "plain"


class AdvantageConfig(Config):
    """How rewards become advantages."""

    estimator: AdvantageEstimator = AdvantageEstimator.GROUP_NORMALIZED
    """group_normalized: (reward - group mean) / group standard deviation (GRPO); group_centered: reward - group mean
    (Dr. GRPO); leave_one_out: reward - mean of the group's other samples (RLOO); plain: reward - batch mean."""
    rewards: Literal["sum", "separate"] = "sum"
    """sum: the estimator gets the sum of all rewards; separate: it gets each reward by itself, and the results are
    summed with the weights of the rewards (GDPO), so that a reward with a small range is not lost beside one with a
    large range."""
    standardize: Literal["none", "sample", "token"] = "none"
    """Standardise the advantages of a step to mean 0 and standard deviation 1: sample: over its samples (GDPO); token:
    over its sampled tokens, so that a long completion counts more (REINFORCE++)."""
    kl_coefficient: Coefficient = 0.0
    """Subtract this times log(policy / reference) of each token from the reward; see kl_level. 0 = no KL in the reward.
    The log-probabilities are those before the update, at the cost of one more forward pass per step if there is one
    update per step."""
    kl_level: Literal["sequence", "token"] = "sequence"
    """sequence: the reward of a sample loses the sum over its tokens before the estimator compares it (RLOO); token:
    the advantage of a token loses the sum over this token and those after it (REINFORCE++)."""

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        if self.rewards == "separate" and self.estimator is not AdvantageEstimator.GROUP_NORMALIZED:
            raise ValueError(
                f"rewards=separate and estimator={self.estimator} exclude each other, because only group_normalized "
                "scales rewards, and without scaling the sum of separate rewards is the same; set "
                "estimator=group_normalized, or rewards=sum"
            )
        if self.kl_coefficient > 0 and self.kl_level == "sequence" and self.rewards == "separate":
            raise ValueError(
                f"kl_coefficient={self.kl_coefficient:g} with kl_level=sequence and rewards=separate exclude each "
                "other, because the penalty belongs to none of the rewards; set kl_level=token"
            )
        if self.kl_coefficient > 0 and self.kl_level == "token" and self.standardize == "sample":
            raise ValueError(
                "kl_level=token and standardize=sample exclude each other, because the tokens of a sample then have "
                "different advantages; set standardize=token, or kl_level=sequence"
            )
        return self


class EntropyControlConfig(Config):
    """Adapts the coefficient of the entropy bonus to a target."""

    target: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Entropy per token, in nats, below which the policy gets a bonus; null = the coefficient stays at
    grpo.loss.entropy_coefficient, where it otherwise starts."""
    step_size: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.005
    """Change of the coefficient per training step: up below the target, down above it."""
    max_coefficient: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """Largest coefficient."""


def _as_mappings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with configs as mappings of the settings that are set."""
    return {
        name: value.model_dump(exclude_unset=True) if isinstance(value, Config) else value
        for name, value in content.items()
    }


class GRPOConfig(Config):
    """Group-relative policy optimization."""

    variant: Variant | None = None
    """Published algorithm whose settings replace the defaults below: grpo, dapo, dr_grpo, gspo, cispo, rloo or
    reinforce_pp; null = the defaults. Settings that you set override those of the variant."""
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
    a KL penalty or an entropy bonus. With advantages.estimator=plain, the group is the whole batch."""
    mask_truncated: bool = False
    """Exclude completions that were truncated at the token limit from the loss."""
    entropy_control: EntropyControlConfig = EntropyControlConfig()
    """Adapts the coefficient of the entropy bonus."""
    async_: AsyncConfig = Field(default=AsyncConfig(), alias="async")
    """Asynchronous training: completions are sampled and scored while the policy trains. With async.max_staleness above
    0, the default of loss.importance_correction is truncate."""

    @model_validator(mode="before")
    @classmethod
    def _settings_of_the_variant(cls, content: Any) -> Any:
        """Add the settings of the variant, except those that are set."""
        if not isinstance(content, Mapping) or content.get("variant") not in list(Variant):
            return content
        return with_bundle(_as_mappings(content), Variant(content["variant"]))

    @model_validator(mode="before")
    @classmethod
    def _corrects_stale_samples(cls, content: Any) -> Any:
        """Turn the importance correction on in asynchronous training, unless it is set."""
        if not isinstance(content, Mapping):
            return content
        settings = _as_mappings(content)
        asynchronous, loss = settings.get("async", settings.get("async_", {})), settings.get("loss", {})
        if not isinstance(asynchronous, Mapping) or not isinstance(loss, Mapping):
            return content
        if asynchronous.get("max_staleness", 0) in (0, "0"):
            return content
        return {**settings, "loss": {"importance_correction": "truncate", **loss}}

    @model_validator(mode="after")
    def _penalises_once(self) -> Self:
        if self.loss.kl_coefficient > 0 and self.advantages.kl_coefficient > 0:
            raise ValueError(
                f"loss.kl_coefficient={self.loss.kl_coefficient:g} and "
                f"advantages.kl_coefficient={self.advantages.kl_coefficient:g} exclude each other, because both "
                "penalise the divergence from the reference policy; set one of them to 0"
            )
        if self.entropy_control.target is not None:
            initial, most = self.loss.entropy_coefficient, self.entropy_control.max_coefficient
            if initial > most:
                raise ValueError(
                    f"loss.entropy_coefficient={initial:g} is above entropy_control.max_coefficient={most:g}; start "
                    "with a smaller coefficient, or raise the largest one"
                )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a KL penalty, in the loss or in the reward, compares with the reference policy."""
        return self.loss.kl_coefficient > 0 or self.advantages.kl_coefficient > 0

    def with_constant_length(self, max_new_tokens: int) -> Self:
        """Return a copy whose loss.constant_length is set."""
        length = self.loss.constant_length or max_new_tokens
        return self.model_copy(update={"loss": self.loss.model_copy(update={"constant_length": length})})


class DistillConfig(GRPOConfig):
    """On-policy distillation: the student samples, and a teacher scores the samples."""

    divergence: Divergence = "sampled"
    """sampled: policy gradient with the advantage teacher - student log-probability of each sampled token; top_k: exact
    divergence over the teacher's `top_k` likeliest tokens and all other tokens together, with a gradient through all
    log-probabilities of the student. top_k has less variance and takes more memory."""
    top_k: PositiveInt = 32
    """Candidates per token, with divergence=top_k."""
    teacher_coefficient: Coefficient = 1.0
    """Weight of the reverse KL divergence KL(student || teacher)."""
    reward_coefficient: Coefficient = 0.0
    """Weight of the advantages that GRPO computes from rewards; 0 learns from the teacher only."""

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        if self.teacher_coefficient == 0 and self.reward_coefficient == 0:
            raise ValueError(
                "teacher_coefficient=0 and reward_coefficient=0 leave nothing to learn; raise one of them, such as "
                "teacher_coefficient=1"
            )
        return self


class TeacherConfig(Config):
    """The teacher of a distillation. It has the student's settings, except these."""

    model_name: str | None = None
    """Model with the student's vocabulary; the same names as `policy.model_name`, such as a folder or `RUN@best`."""
    trust_remote_code: bool = False
    """Run Python code from the model folder."""
    precision: Precision | None = None
    """Precision of the teacher's computations; by default `policy.precision`."""
    temperature: PositiveFloat | None = None
    """Temperature of the teacher's distribution; by default `policy.generation.temperature`, so that equal logits mean
    no divergence."""
    placement: Literal["driver", "separate"] = "driver"
    """driver: in the process of the driver, as a policy of one rank; separate: in separate processes."""
    num_workers: PositiveInt = 1
    """Ranks of a separate teacher; they split its weights and the samples."""

    @model_validator(mode="after")
    def _ranks_have_processes(self) -> Self:
        if self.num_workers > 1 and self.placement == "driver":
            raise ValueError(
                f"num_workers={self.num_workers} needs as many processes, but placement=driver is one process; set "
                "placement=separate"
            )
        return self

    def policy(self, student: PolicyConfig) -> PolicyConfig:
        """Return the teacher's settings as a policy."""
        assert self.model_name is not None, "checked before the run starts"
        temperature = self.temperature or student.generation.temperature
        update = {
            "model_name": self.model_name,
            "tokenizer": None,
            "trust_remote_code": self.trust_remote_code,
            "precision": self.precision or student.precision,
            "generation": student.generation.model_copy(update={"temperature": temperature}),
            "dtensor_cfg": DTensorConfig(),
            "lora": None,
        }
        return student.model_copy(update=update)


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
