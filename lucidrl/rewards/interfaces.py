"""What a verifier receives and returns. Nothing here imports torch: verifiers run in small processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Completion:
    """The text to score."""

    text: str
    num_tokens: int


class ParseFailure(Exception):  # noqa: N818 - an outcome of a verifier, not an error of the program
    """The completion holds nothing that the verifier can read, such as no number; the message says what was missing."""


class Verifier(Protocol):
    """Scores one completion against the columns of its row, such as `answer`.

    Raises ParseFailure for an unreadable completion. Any other exception is a crash: a defect of the verifier, or a row
    that it cannot use.
    """

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float: ...
