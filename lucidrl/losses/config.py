"""Settings of losses."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lucidrl.utils.config import Config

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Divergence = Literal["sampled", "top_k"]
"""How a distillation measures the divergence from the teacher; see `lucidrl.losses.distillation`."""


class ClippedPGConfig(Config):
    """Clipped policy gradient, the loss of PPO, GRPO and related algorithms for language models."""

    objective: Literal["clip", "cispo"] = "clip"
    """clip: the clipped ratio times the advantage (PPO, GRPO); cispo: the ratio, bounded by 1 - clip_low and
    1 + clip_high and without gradient, times advantage times log-probability, so that every token keeps a gradient."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Tokens with negative advantage get no gradient once their ratio is below 1 - clip_low; 1 = no lower bound."""
    clip_high: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2
    """Tokens with positive advantage get no gradient once their ratio is above 1 + clip_high. A value above clip_low
    keeps exploration up."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Bound the loss of tokens with negative advantage at this ratio, commonly 3; null = no bound."""
    ratio_level: Literal["token", "sequence", "sequence_product"] = "token"
    """token: one ratio per token; sequence: one ratio per sequence, the geometric mean of its token ratios (GSPO);
    sequence_product: the product of its token ratios, so that a completion is one action (RLOO). sequence needs smaller
    values of clip_low and clip_high."""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """token: mean over all valid tokens; sequence: mean over each sequence's tokens, then over sequences, so that long
    and short completions have equal weight; constant: sum over each sequence's tokens divided by constant_length, then
    mean over sequences (Dr. GRPO)."""
    constant_length: PositiveInt | None = None
    """Divisor of normalization=constant; null = policy.generation.max_new_tokens."""
    kl_coefficient: Coefficient = 0.0
    """Weight of the KL divergence from the reference policy; 0 needs no reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log(policy / reference): k1 = d, k2 = d²/2, k3 = exp(-d) + d - 1. On policy, the expected gradient of k1
    is zero, that of k2 is the gradient of KL(policy ‖ reference), that of k3 is the gradient of
    KL(reference ‖ policy)."""
    entropy_coefficient: Coefficient = 0.0
    """Weight of the entropy bonus; 0 skips the entropy."""
    importance_correction: Literal["none", "truncate", "mask"] = "none"
    """Correct for the mismatch of generator and trainer: multiply the loss of each token by its importance weight.
    truncate: limit the weights to importance_floor and importance_cap; mask: exclude tokens with weights outside these
    bounds from the loss and its mean, at the cost of one more forward pass per step if there is one update per step."""
    importance_level: Literal["token", "sequence", "sequence_mean"] = "token"
    """token: the weight of a token is exp(prev - generation log-probability); sequence: all tokens of a sequence have
    the product of these weights; sequence_mean: all have their geometric mean."""
    importance_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Largest importance weight; see importance_correction."""
    importance_floor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Smallest importance weight; 0 = no lower bound."""

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        if self.objective == "cispo" and self.dual_clip is not None:
            raise ValueError(
                f"objective=cispo and dual_clip={self.dual_clip:g} exclude each other, because cispo bounds the weight "
                "of every token already; remove dual_clip, or set objective=clip"
            )
        if self.objective == "cispo" and self.ratio_level != "token":
            raise ValueError(
                f"objective=cispo and ratio_level={self.ratio_level} exclude each other, because cispo weights the "
                "log-probability of each token by that token's ratio; set ratio_level=token, or objective=clip"
            )
        if self.ratio_level == "sequence_product" and self.normalization != "sequence":
            raise ValueError(
                f"ratio_level=sequence_product and normalization={self.normalization} exclude each other, because the "
                "product of a sequence's ratios counts once per sequence; set normalization=sequence"
            )
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.importance_floor > self.importance_cap:
            raise ValueError(
                f"importance_floor={self.importance_floor:g} is above importance_cap={self.importance_cap:g}; set a "
                "floor below 1 and a cap above 1"
            )
        return self


class PreferenceConfig(Config):
    """A loss on preferences; see `lucidrl.losses.preference` for the formulas."""

    loss: Literal["dpo", "ipo", "kto"] = "dpo"
    """dpo: logistic loss of each pair; ipo: squared distance of each pair's margin from 1 / (2 beta), with mean
    log-probabilities per token; kto: every completion by itself, desirable or undesirable, without pairs."""
    beta: PositiveFloat = 0.1
    """How strongly the policy is tied to the reference policy: a small value lets it move further away."""
    desirable_weight: Coefficient = 1.0
    """Weight of chosen or desirable completions, with loss=kto."""
    undesirable_weight: Coefficient = 1.0
    """Weight of rejected or undesirable completions, with loss=kto."""

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        if self.desirable_weight == 0 and self.undesirable_weight == 0:
            raise ValueError(
                "desirable_weight=0 and undesirable_weight=0 leave nothing to learn; raise one of them, such as "
                "desirable_weight=1"
            )
        return self
