"""How completions are sampled."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lucidrl.utils.config import Config


class GenerationConfig(Config):
    """Sampling of completions during training."""

    max_new_tokens: PositiveInt = 64
    """Most tokens in one completion (of one turn)."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Divides the logits. Scoring and training use the same value, so the policy means one distribution everywhere."""
    top_k: NonNegativeInt = 0
    """Draw among the k likeliest tokens only; 0 = all. Log-probabilities stay those of the full distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw among the likeliest tokens that together hold this probability; 1 = all."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A completion ends as soon as it contains one of these."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end a completion, beside those the model declares itself."""
    max_concurrent_rows: PositiveInt = 512
    """Completions decoded at a time; bounds the memory of the key-value cache, and changes results by rounding only."""
    placement: Literal["policy", "separate"] = "policy"
    """Where completions are made: by the policy's own workers, or in processes of their own with a copy of the
    weights, which get the policy's after every step."""
    num_workers: PositiveInt = 1
    """Processes that share the prompts, where they are separate."""
    nodes: Literal["any", "policy", "other"] = "any"
    """Nodes of a Ray cluster that they may run on: any (with `refit=ipc` those of the policy's workers), those of the
    policy's workers, or others than those."""
    max_restarts: NonNegativeInt = 3
    """Consecutive restarts of one separate process that exited or timed out, without a generated chunk in between;
    at the next loss the run stops."""
    refit: Literal["auto", "ipc", "collective"] = "auto"
    """How weights reach separate processes: through memory shared within a node (`ipc`), over the network
    (`collective`), or each by the one that fits where it is (`auto`)."""
    refit_bucket_mb: PositiveInt = 256
    """Most of the weights that travel together; two such buckets are under way at a time."""
    verify_refit: bool = False
    """Compare checksums of the weights on both sides of every refit."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.placement == "policy" and self.nodes != "any":
            raise ValueError(
                f"nodes={self.nodes} is for generators beside the policy's workers, but placement=policy; set "
                "placement=separate, or leave nodes out"
            )
        if self.refit == "ipc" and self.nodes == "other":
            raise ValueError("refit=ipc shares memory within a node, but nodes=other; set refit=auto, or nodes=policy")
        return self
