"""Configuration of losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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
