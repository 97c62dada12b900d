"""The interface of verifiers. This module does not import torch: verifiers run in small processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

LLM_JUDGE = "judge"
"""Name of the LLM judge, which is a reward beside the verifiers."""


@dataclass(frozen=True)
class Completion:
    """A completion to score."""

    text: str
    num_tokens: int


class ParseFailure(Exception):  # noqa: N818 - an outcome of a verifier, not an error of the program
    """The completion has nothing to verify, such as no number; the message says what is missing."""


class Verifier(Protocol):
    """Scores one completion against the columns of its row, such as `answer`.

    Raises ParseFailure for a completion that has nothing to verify. Any other exception is a crash: a defect of the
    verifier, or a row that the verifier cannot use.
    """

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float: ...
