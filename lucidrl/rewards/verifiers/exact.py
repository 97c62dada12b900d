"""`exact`: the completion must equal the reference answer."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.verifiers.reading import AnswerConfig, references_of, text_of


class ExactConfig(AnswerConfig):
    """Which differences are ignored."""

    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    normalize_spaces: bool = False
    """Treat any run of white space as one space."""
    normalize_unicode: bool = False
    """Treat compatible characters alike, such as ² and 2 (NFKC)."""


class ExactVerifier:
    """Reward 1 if the completion equals the reference answer, otherwise 0."""

    def __init__(self, config: ExactConfig) -> None:
        self._config = config

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        references = [self._normalized(reference) for reference in references_of(row, self._config)]
        text = self._normalized(text_of(completion, self._config))
        if not text.strip() and text not in references:
            raise ParseFailure("the completion is empty")
        return float(text in references)

    def answer(self, completion: Completion, row: Mapping[str, Any]) -> str:
        """Return the normalised text that is compared."""
        return self._normalized(text_of(completion, self._config))

    def _normalized(self, text: str) -> str:
        config = self._config
        if config.normalize_unicode:
            text = unicodedata.normalize("NFKC", text)
        if config.normalize_spaces:
            text = " ".join(text.split()) if config.strip else _with_single_spaces(text)
        if config.strip:
            text = text.strip()
        return text.casefold() if config.ignore_case else text


def _with_single_spaces(text: str) -> str:
    words = " ".join(text.split())
    if not words:
        return " " if text else ""
    return (" " if text[0].isspace() else "") + words + (" " if text[-1].isspace() else "")
