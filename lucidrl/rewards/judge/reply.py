"""Read the score from a reply of the LLM judge."""

from __future__ import annotations

import re

from lucidrl.rewards.interfaces import ParseFailure
from lucidrl.rewards.judge.config import JudgeConfig
from lucidrl.rewards.verifiers.reading import shortened

_MARKUP = r"[\"'*_`\s]{0,8}"
_LABEL = re.compile(
    rf"(?<![^\W_])score{_MARKUP}(?:\([^()\n]{{0,40}}\){_MARKUP})?[:=]{_MARKUP}(?=[-+.]?\d)", re.IGNORECASE | re.ASCII
)
"""`Score:`, `**Score:**`, `Final score (0 to 10):` or `"score":`, before a number."""
_NUMBER = re.compile(
    r"([-+]?(?:\d++(?:\.\d++)?|\.\d++))(?:\s{0,2}/\s{0,2}(\d++(?:\.\d++)?))?+"
    r"(?=$|[\s*_`\"'.,;:)\]}])(?![.,]\d)"
    r"(?![*_`\"' \t]{0,8}(?:[-\u2013\u2014]|(?:or|to|and)(?=[*_`\"' \t]))[*_`\"' \t]{0,8}\d)",
    re.ASCII | re.IGNORECASE,
)
"""A number, or a number of a maximum such as 7/10; not a range such as 7-8 or 7 to 8, not 7 or 8, and not 70%."""


def score_of(reply: str, config: JudgeConfig) -> float:
    """The score of a reply: the number after the last `Score:`, or after the last key `score` of JSON.

    Raises:
        ParseFailure: there is no such number, or it is not in the range.
    """
    labels = list(_LABEL.finditer(reply))
    if not labels:
        raise ParseFailure(f"the reply {_end_of(reply)} has no line like `Score: {config.max_score:g}`")
    number = _NUMBER.match(reply, labels[-1].end())
    if number is None:
        raise ParseFailure(f"the reply {_end_of(reply)} has no single number after its last `Score:`")
    score = float(number[1])
    if number[2] is not None and float(number[2]) != config.max_score:
        raise ParseFailure(f"the score {number[0]} is not out of max_score={config.max_score:g}")
    if not config.min_score <= score <= config.max_score:
        raise ParseFailure(f"the score {score:g} is not within {config.min_score:g} to {config.max_score:g}")
    if not config.rescale:
        return score
    return (score - config.min_score) / (config.max_score - config.min_score)


def _end_of(reply: str) -> str:
    return shortened(reply if len(reply) <= 120 else f"...{reply[-117:]}")
