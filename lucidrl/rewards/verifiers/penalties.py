"""`length`, `overlong` and `repetition`: penalties from 0 to -1 for long or repetitive completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import PositiveInt, model_validator

from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.verifiers.reading import MAX_CHARS
from lucidrl.utils.config import Config


class LengthConfig(Config):
    """The lengths at which the penalty starts and ends."""

    max_tokens: PositiveInt
    """Completions of this many tokens or more get -1."""
    free_tokens: int = 0
    """Completions up to this many tokens get 0."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not 0 <= self.free_tokens < self.max_tokens:
            raise ValueError(f"free_tokens={self.free_tokens} must be from 0 to below max_tokens={self.max_tokens}")
        return self


class LengthVerifier:
    """Penalty by length: 0 up to `free_tokens`, then linearly down to -1 at `max_tokens`."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        free, most = self._config.free_tokens, self._config.max_tokens
        return _falling(completion.num_tokens, free, most)


class OverlongConfig(Config):
    """The length limit of the soft overlong penalty."""

    max_tokens: PositiveInt
    """Completions of this many tokens or more get -1; usually `policy.generation.max_new_tokens`."""
    buffer_tokens: PositiveInt
    """The penalty starts this many tokens before `max_tokens`."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens={self.buffer_tokens} must not be above max_tokens={self.max_tokens}")
        return self


class OverlongVerifier:
    """The soft overlong penalty of DAPO: 0 up to `max_tokens - buffer_tokens`, linearly down to -1 at `max_tokens`."""

    def __init__(self, config: OverlongConfig) -> None:
        self._config = config

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        most = self._config.max_tokens
        return _falling(completion.num_tokens, most - self._config.buffer_tokens, most)


class RepetitionConfig(Config):
    """What counts as a repetition."""

    ngram_size: PositiveInt = 3
    """Number of consecutive words (or characters) in an n-gram."""
    unit: Literal["words", "characters"] = "words"
    """Unit of an n-gram; `characters` suits languages without spaces."""


class RepetitionVerifier:
    """Minus the fraction of n-grams that occurred earlier in the completion: 0 without repetitions, near -1 for one
    repeated word."""

    def __init__(self, config: RepetitionConfig) -> None:
        self._config = config

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        if len(completion.text) > MAX_CHARS:
            raise ParseFailure(
                f"the completion has {len(completion.text):,} characters; at most {MAX_CHARS:,} are read"
            )
        units = completion.text if self._config.unit == "characters" else completion.text.split()
        num_ngrams = len(units) - self._config.ngram_size + 1
        if num_ngrams < 1:
            return 0.0
        distinct = {hash(tuple(units[start : start + self._config.ngram_size])) for start in range(num_ngrams)}
        return len(distinct) / num_ngrams - 1.0


def _falling(number: int, start: int, end: int) -> float:
    """0 up to `start`, linearly down to -1 at `end`."""
    return -min(max((number - start) / (end - start), 0.0), 1.0)
