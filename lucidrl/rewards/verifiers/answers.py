"""Read the answers of completions, for a majority vote over several samples; equal answers become equal strings.

The answers of `exact`, `numeric` and `choice` are those that the verifier compares. The answer of `math` is the number
in the last box, its content without white space if it is not a number, or the last number if there is no box. Other
verifiers and reward functions read no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lucidrl.data.reading import last_boxed
from lucidrl.errors import DataError
from lucidrl.rewards.config import RewardConfig
from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.verifiers.choice import ChoiceConfig, ChoiceVerifier
from lucidrl.rewards.verifiers.exact import ExactConfig, ExactVerifier
from lucidrl.rewards.verifiers.math import MathConfig
from lucidrl.rewards.verifiers.numeric import SEARCHED_CHARS, NumberReader, NumericConfig, NumericVerifier
from lucidrl.rewards.verifiers.reading import tail, text_of
from lucidrl.utils.config import validate

AnswerReader = Callable[[str, Mapping[str, Any]], str | None]
"""Returns the answer of a (completion, row); None if the completion has none."""


def answer_reader(rewards: Sequence[RewardConfig]) -> AnswerReader | None:
    """Return the reader of the first reward that reads an answer; None if no reward does."""
    for reward in rewards:
        if reward.name in _READERS:
            read = _READERS[reward.name](reward.kwargs)
            return lambda text, row: _answer_or_none(read, Completion(text, 0), row)
    return None


_Reader = Callable[[Completion, Mapping[str, Any]], str | None]


def _answer_or_none(read: _Reader, completion: Completion, row: Mapping[str, Any]) -> str | None:
    try:
        return read(completion, row)
    except (ParseFailure, DataError):
        return None


def _exact(kwargs: Mapping[str, Any]) -> _Reader:
    return ExactVerifier(validate(ExactConfig, dict(kwargs), at="reward.kwargs")).answer


def _numeric(kwargs: Mapping[str, Any]) -> _Reader:
    return NumericVerifier(validate(NumericConfig, dict(kwargs), at="reward.kwargs")).answer


def _choice(kwargs: Mapping[str, Any]) -> _Reader:
    return ChoiceVerifier(validate(ChoiceConfig, dict(kwargs), at="reward.kwargs")).answer


def _math(kwargs: Mapping[str, Any]) -> _Reader:
    config, numbers = validate(MathConfig, dict(kwargs), at="reward.kwargs"), NumberReader()

    def read(completion: Completion, row: Mapping[str, Any]) -> str | None:
        text = text_of(completion, config)
        if (boxed := last_boxed(text)) is not None:
            number = numbers.whole(boxed)
            return "".join(boxed.split()) if number is None else str(number)
        number = numbers.last(tail(text, SEARCHED_CHARS))
        return None if number is None else str(number)

    return read


_READERS: dict[str, Callable[[Mapping[str, Any]], _Reader]] = {
    "exact": _exact,
    "numeric": _numeric,
    "choice": _choice,
    "math": _math,
}
