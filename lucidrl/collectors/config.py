"""Configuration of collectors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from lucidrl.utils.config import Config


class TextCollectorConfig(Config):
    """How many samples make a training step."""

    prompts_per_step: PositiveInt = 32
    """Prompts per step. They are all different if the dataset has at least this many."""
    samples_per_prompt: PositiveInt = 8
    """Samples per prompt. They form a group; advantages compare the rewards within a group."""
    max_turns: PositiveInt = 1
    """Most completions per sample; the collector ends a sample after this many, even if the environment is not done."""
    refill_rounds: NonNegativeInt = 0
    """Replace groups with equal rewards, from which the policy learns nothing, by groups of new prompts; at most this
    many times per step."""
    max_concurrent_samples: PositiveInt | None = None
    """Most samples that are open in asynchronous training: their first completion has started, and they are not done.
    Bounds what the environment holds; null = as many as `max_staleness` allows."""


class AsyncConfig(Config):
    """Generation, environments and training at the same time."""

    max_staleness: NonNegativeInt = 0
    """Steps that a token may be older than in synchronous training: a step trains on tokens of at most this many policy
    versions before its own. 0 = synchronous. Above 0, completions are sampled while the policy trains, in separate
    generators."""
    stale_samples: Literal["wait", "drop", "regenerate"] = "wait"
    """What to do with samples that would be too old once they are finished. wait: a step waits for samples that no
    later step may train on, so that none becomes too old; drop: the step does not wait, and they are left out, which
    removes long samples more often than short ones; regenerate: the step does not wait, and they begin again with
    newer weights."""
    group_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A step may train on a group once this fraction of its samples is finished; the other samples are aborted and
    dropped. 1 = only complete groups. A smaller fraction removes long samples more often than short ones."""
