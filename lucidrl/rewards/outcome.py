"""The outcome of a verification, in the environment's process or in a pool."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lucidrl.errors import DataError
from lucidrl.rewards.interfaces import Completion, ParseFailure, PoolJob, Text

VerifierOutcome = Literal["scored", "timeout", "crash", "parse_failure"]


@dataclass(frozen=True)
class Verified:
    """The outcome of verifying one completion."""

    outcome: VerifierOutcome
    score: float = math.nan
    """The score if the outcome is `scored`, else NaN."""
    detail: str = ""
    """The reason of any other outcome."""
    seconds: float = 0.0
    """Seconds from the start of the verification to the outcome, if a pool verified the completion."""
    is_bad_row: bool = False
    """Whether the verification crashed because the verifier cannot use the row."""
    text: str = ""
    """The result of a tool whose outcome is `scored`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the verification by name, below `reward/<name>/`."""


def verified(verifier: PoolJob, completion: Completion, row: Mapping[str, Any]) -> Verified:
    """Verify a completion in this process; a ParseFailure or other exception of the verifier becomes the outcome."""
    try:
        score = verifier(completion, row)
        if isinstance(score, Text):
            return Verified("scored", text=score)
        if not isinstance(score, numbers.Real):
            return Verified("crash", detail=f"returned a {type(score).__name__} instead of a number")
        number = float(score)
    except ParseFailure as failure:
        return Verified("parse_failure", detail=str(failure))
    except DataError as error:
        return Verified("crash", detail=str(error), is_bad_row=True)
    except Exception as error:
        return Verified("crash", detail=f"{type(error).__name__}: {error}")
    if not math.isfinite(number):
        return Verified("crash", detail=f"returned {number} instead of a finite number")
    return Verified("scored", number)
