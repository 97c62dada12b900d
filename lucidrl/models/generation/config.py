"""How completions are sampled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

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
    """Completions decoded at a time; bounds the memory of the key-value cache and changes no result."""
    placement: Literal["policy", "separate"] = "policy"
    """Where completions are made: by the policy's own workers, or in processes of their own with a copy of the
    weights, which get the policy's after every step."""
    num_workers: PositiveInt = 1
    """Processes that share the prompts, where they are separate."""
    refit: Literal["ipc", "collective"] = "ipc"
    """How weights reach separate processes: through memory shared within one machine, or over the network."""
    refit_bucket_mb: PositiveInt = 256
    """Most of the weights that travel together; two such buckets are under way at a time."""
    verify_refit: bool = False
    """Compare checksums of the weights on both sides of every refit."""
