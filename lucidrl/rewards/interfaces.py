"""The interface of verifiers. This module does not import torch: verifiers run in small processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lucidrl.data.reading import ParseFailure

__all__ = ["Completion", "Limits", "ParseFailure", "Verifier"]

TIMEOUT_S = 5.0
MEMORY_LIMIT_MB = 1024
LLM_JUDGE = "judge"
"""Name of the LLM judge, which is a reward beside the verifiers."""


@dataclass(frozen=True)
class Completion:
    """A completion to score."""

    text: str
    num_tokens: int


class Limits(NamedTuple):
    """Limits of one verification in a pool."""

    timeout_s: float = TIMEOUT_S
    memory_bytes: int = MEMORY_LIMIT_MB << 20
    """Address space, in addition to what the process has before its first verification."""


DEFAULT_LIMITS = Limits()


class Verifier(Protocol):
    """Scores one completion against the columns of its row, such as `answer`.

    Raises ParseFailure for a completion that has nothing to verify, and DataError for a row that the verifier cannot
    use. Any other exception is a crash: a defect of the verifier.
    """

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float: ...
