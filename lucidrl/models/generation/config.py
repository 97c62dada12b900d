"""Settings of generation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lucidrl.utils.config import Config


class GenerationConfig(Config):
    """How completions are sampled during training, and where."""

    max_new_tokens: PositiveInt = 64
    """Maximum number of tokens per completion (per turn)."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Divides the logits. Scoring and training use the same value, so that their log-probabilities agree."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0 = all. Log-probabilities stay those of the full distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of most likely tokens with this total probability; 1 = all."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A completion ends when it contains one of these."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end a completion, in addition to those that the model declares."""
    max_concurrent_rows: PositiveInt = 512
    """Completions decoded at a time; limits the key-value cache. Changes results by rounding only."""
    placement: Literal["policy", "separate"] = "policy"
    """Who generates: the policy's ranks, or separate processes with a copy of the weights that is refitted after every
    step."""
    num_workers: PositiveInt = 1
    """Number of separate processes, which split the prompts."""
    nodes: Literal["any", "policy", "other"] = "any"
    """Nodes of a Ray cluster for separate processes: any (with `refit=ipc` those of the policy's ranks), those of the
    policy's ranks, or all others."""
    max_restarts: NonNegativeInt = 3
    """Consecutive restarts of one separate process, after it exited or timed out, without a completed chunk in between.
    One more loss stops the run."""
    refit: Literal["auto", "ipc", "collective"] = "auto"
    """How weights reach separate processes: through shared memory on a node (`ipc`), over the network (`collective`),
    or by whichever fits each process (`auto`)."""
    refit_bucket_mb: PositiveInt = 256
    """Size of a bucket of weights; two buckets are in flight at a time."""
    verify_refit: bool = False
    """Compare checksums of the weights on both sides at every refit."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.placement == "policy" and self.nodes != "any":
            raise ValueError(
                f"nodes={self.nodes} is for separate generators, but placement=policy; set placement=separate, or "
                "leave nodes out"
            )
        if self.refit == "ipc" and self.nodes == "other":
            raise ValueError("refit=ipc shares memory on a node, but nodes=other; set refit=auto, or nodes=policy")
        return self
