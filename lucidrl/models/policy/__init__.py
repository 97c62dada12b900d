"""Policies: the workers that train, score and save a language model."""

from lucidrl.models.policy.config import PolicyConfig

__all__ = ["PolicyConfig"]
