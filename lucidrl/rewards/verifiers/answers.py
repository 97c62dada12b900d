"""Read the answers of completions, for a majority vote over several samples; equal answers become equal strings.

The answers of `exact`, `numeric` and `choice` are those that the verifier compares. The answer of `math` is the number
or text in the last box, without a name (x = 5) and a unit, or else the content of the box without white space. Without
a box, it is the last number, unless `read=boxed`. Other verifiers and reward functions read no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lucidrl.data.reading import last_boxed
from lucidrl.errors import DataError
from lucidrl.rewards.config import RewardConfig
from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.verifiers import VERIFIERS
from lucidrl.rewards.verifiers.math import MathConfig, Term
from lucidrl.rewards.verifiers.numeric import SEARCHED_CHARS, NumberReader
from lucidrl.rewards.verifiers.reading import tail, text_of
from lucidrl.utils.config import validate

AnswerReader = Callable[[str, Mapping[str, Any]], str | None]
"""Returns the answer of a (completion, row); None if the completion has none."""

_WITH_ANSWER = ("exact", "numeric", "choice")
"""Verifiers that have a method `answer`."""
_NUMBERS = NumberReader()
_NAMED = re.compile(r"\s*\\?[A-Za-z]\w*\s*=([^=]+)")
"""An answer with its name, such as x = 5."""


def answer_reader(rewards: Sequence[RewardConfig]) -> AnswerReader | None:
    """Return the reader of the first reward that reads an answer; None if no reward does."""
    for reward in rewards:
        if reward.name in _WITH_ANSWER:
            verifier: Any = VERIFIERS[reward.name].make(reward.kwargs)
            return _failing_as_none(verifier.answer)
        if reward.name == "math":  # the verifier itself would load sympy
            config = validate(MathConfig, dict(reward.kwargs), at="reward.kwargs")
            return _failing_as_none(partial(_math_answer, config))
    return None


def _failing_as_none(read: Callable[[Completion, Mapping[str, Any]], str | None]) -> AnswerReader:
    def read_or_none(text: str, row: Mapping[str, Any]) -> str | None:
        try:
            return read(Completion(text, 0), row)
        except (ParseFailure, DataError):
            return None

    return read_or_none


def _math_answer(config: MathConfig, completion: Completion, row: Mapping[str, Any]) -> str | None:
    text = text_of(completion, config)
    boxed = last_boxed(text)
    if boxed is None:
        last = _NUMBERS.last(tail(text, SEARCHED_CHARS)) if config.read != "boxed" else None
        return None if last is None else str(last)
    named = _NAMED.fullmatch(boxed)
    content = boxed if named is None else named[1]
    term = Term(content)
    if term.is_text:
        return term.words
    number = term.number.value if term.number is not None else _NUMBERS.whole(content)
    return "".join(content.split()) if number is None else str(number)
