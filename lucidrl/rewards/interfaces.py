"""The interface of verifiers. This module does not import torch: verifiers run in small processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lucidrl.data.reading import ParseFailure

__all__ = ["Completion", "Limits", "ParseFailure", "PoolJob", "SampleTime", "Text", "Verifier"]

TIMEOUT_S = 5.0
MEMORY_LIMIT_MB = 1024
REWARD_MODEL = "model:"
"""Beginning of the name of a reward model, which is followed by its folder."""
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


@dataclass(frozen=True)
class SampleTime:
    """The most time that a part of an environment needs per sample, and how many samples it scores at once."""

    seconds: float
    num_at_once: int = 1

    def of(self, num_samples: int) -> float:
        """Upper bound on the seconds for some samples.

        It has a round more than the samples fill, because the first samples may start before the others arrive.
        """
        return self.seconds * (math.ceil(num_samples / self.num_at_once) + 1)


DEFAULT_LIMITS = Limits()


class Text(str):
    """The result of a tool, which runs in a pool as verifiers do but returns text instead of a score."""

    __slots__ = ()


class Verifier(Protocol):
    """Scores one completion against the columns of its row, such as `answer`.

    Raises ParseFailure for a completion that has nothing to verify, and DataError for a row that the verifier cannot
    use. Any other exception is a crash: a defect of the verifier.
    """

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float: ...


PoolJob = Callable[[Completion, Mapping[str, Any]], float | Text]
"""What a pool runs: a verifier or a tool."""
