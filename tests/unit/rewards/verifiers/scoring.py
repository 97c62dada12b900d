"""Shared by the tests of verifiers."""

from __future__ import annotations

from typing import Any

from lucidrl.rewards.interfaces import DEFAULT_LIMITS, Completion, Limits, ParseFailure
from lucidrl.rewards.verifiers import make_verifier


def score(
    verifier: str, text: str, row: dict[str, Any], num_tokens: int = 1, limits: Limits = DEFAULT_LIMITS, **kwargs: Any
) -> float:
    return make_verifier(verifier, kwargs, limits)(Completion(text, num_tokens), row)


def outcome(verifier: str, text: str, row: dict[str, Any], **kwargs: Any) -> float | str:
    """The reward, or "parse failure"."""
    try:
        return score(verifier, text, row, **kwargs)
    except ParseFailure:
        return "parse failure"
