r"""`numeric`: the number in `\boxed{}`, or the last number of the completion, must equal the reference answer."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from lucidrl.data.reading import last_boxed
from lucidrl.errors import DataError
from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.verifiers.reading import AnswerConfig, references_of, shortened, tail, text_of

Separator = Literal[",", ".", "'", " ", ""]

SEARCHED_CHARS = 20_000
"""The last number must be in this many last characters."""
MAX_DIGITS = 1_000
MAX_EXPONENT = 400

_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{NO-BREAK SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " "})
_FRACTION = re.compile(r"(?P<after_digit>(?<=\d)\s*)?\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}\{\s*(-?\d+)\s*\}|(\d)\s*(\d))")
_SPACED_DIGITS = re.compile(r"(?<=\d)\\[,!](?=\d{3})")
_SPACING = re.compile(r"\\(?:[,!;:]|text|mathrm|mathbf)")
_UNIT = re.compile(r"(?![xyzabnk]\b)[^\d+*/=-]*(?:/[^\d+*/=-]*)?(?:\^\{?\d\}?)?[^\d+*/=-]*")
"""A unit that may follow a boxed number: km/h, cm^2, but not x+5."""


class NumericConfig(AnswerConfig):
    """How numbers are read and compared."""

    read: Literal["boxed_or_last", "boxed", "last"] = "boxed_or_last"
    r"""`boxed`: the number in the last `\boxed{}`; `last`: the last number; `boxed_or_last`: the last number if nothing
    is boxed."""
    absolute_tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Largest difference that counts as equal."""
    relative_tolerance: float = Field(default=0.0, ge=0, lt=1)
    """Largest difference that counts as equal, as a fraction of the reference answer. The larger of both tolerances
    applies; if both are 0, the numbers must be equal."""
    thousands_separator: Separator = ","
    """Character between groups of three digits; with `.`, the comma is the decimal sign. Empty: no separator."""
    percent: Literal["ignore", "hundredth"] = "ignore"
    """`ignore`: 50% is 50; `hundredth`: 50% is 0.5."""


class NumericVerifier:
    """Reward 1 if the number in the completion equals the reference answer within the tolerance, otherwise 0."""

    def __init__(self, config: NumericConfig) -> None:
        self._config = config
        self._numbers = NumberReader(config.thousands_separator, config.percent)

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        expected = [self._expected(reference) for reference in references_of(row, self._config)]
        number = self._read(text_of(completion, self._config))
        return float(any(self._are_close(number, reference) for reference in expected))

    def answer(self, completion: Completion, row: Mapping[str, Any]) -> str:
        """Return the number that is compared, as an integer or fraction."""
        return str(self._read(text_of(completion, self._config)))

    def _expected(self, reference: str) -> Fraction:
        try:
            number = self._numbers.whole(reference)
        except ParseFailure as failure:
            raise DataError(
                f"the reference answer {shortened(reference)} is not usable: {failure}; fix the row"
            ) from None
        if number is None:
            remedy = "fix it, or set reward.kwargs.answer_after or thousands_separator"
            raise DataError(f"the reference answer {shortened(reference)} is not a number; {remedy}")
        return number

    def _read(self, text: str) -> Fraction:
        boxed = last_boxed(text) if self._config.read != "last" else None
        if boxed is None and self._config.read == "boxed":
            raise ParseFailure(r"the completion has no \boxed{}")
        if boxed is not None:
            if (number := self._numbers.with_unit(boxed)) is None:
                raise ParseFailure(f"the last \\boxed{{}} holds {shortened(boxed, 50)}, not a number")
            return number
        if (number := self._numbers.last(tail(text, SEARCHED_CHARS))) is None:
            raise ParseFailure(f"no number in the last {SEARCHED_CHARS:,} characters")
        return number

    def _are_close(self, number: Fraction, reference: Fraction) -> bool:
        config = self._config
        tolerance = max(Fraction(config.absolute_tolerance), Fraction(config.relative_tolerance) * abs(reference))
        return abs(number - reference) <= tolerance


@dataclass(frozen=True)
class NumberReader:
    """Reads numbers such as -1,234.5, 3/4, 1 1/2, 1.5e-3, 50%, \\frac{3}{4}, exactly."""

    thousands: Separator = ","
    percent: Literal["ignore", "hundredth"] = "ignore"

    def last(self, text: str) -> Fraction | None:
        """The last number in the text, or None."""
        matches = deque(self._pattern.finditer(_plain(text)), maxlen=1)
        return self._value(matches[0]) if matches else None

    def whole(self, text: str) -> Fraction | None:
        """The number if the text is one number, perhaps with a currency sign; else None."""
        match = self._pattern.fullmatch(_bare(text))
        return self._value(match) if match else None

    def with_unit(self, text: str) -> Fraction | None:
        """The number if the text is one number, perhaps with a name (x = 5) and a unit; else None."""
        bare = _bare(text.rpartition("=")[2])
        match = self._pattern.match(bare)
        return self._value(match) if match and _UNIT.fullmatch(bare[match.end() :]) else None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        point = re.escape("," if self.thousands == "." else ".")
        digits = r"\d+"
        if self.thousands:
            digits = rf"\d{{1,3}}(?:{re.escape(self.thousands)}\d{{3}})+(?!\d)|\d+"
        # Not in a word or an exponent (x2, cm^2). A minus after a word, a digit or a parenthesis is an operator.
        return re.compile(
            rf"(?<![\w^\\])(?<!\^\{{)(?<!\d{point})(?P<sign>(?<!\))-)?[$€£]?(?:(?P<mixed>\d+)\s+(?=\d+/\d))?"
            rf"(?P<number>(?:{digits})(?:{point}\d+)?|{point}\d+)"
            r"(?:[eE](?P<exponent>[-+]?\d+)(?!\w)|\s?/\s?(?P<denominator>\d+)(?!\d|\.\d))?(?:\s?\\?(?P<percent>%))?",
            re.ASCII,
        )

    def _value(self, match: re.Match[str]) -> Fraction:
        if len(match[0]) > MAX_DIGITS:
            raise ParseFailure(f"the number has {len(match[0]):,} characters; at most {MAX_DIGITS:,} are read")
        digits = match["number"].replace(self.thousands, "") if self.thousands else match["number"]
        value = Fraction(digits.replace(",", "."))
        if match["exponent"]:
            if len(match["exponent"]) > 5 or abs(int(match["exponent"])) > MAX_EXPONENT:
                raise ParseFailure(f"the exponent {match['exponent'][:20]} is beyond {MAX_EXPONENT}")
            value *= Fraction(10) ** int(match["exponent"])
        if match["denominator"]:
            if int(match["denominator"]) == 0:
                raise ParseFailure("the number is a division by zero")
            value /= int(match["denominator"])
        value += int(match["mixed"] or 0)
        if match["percent"] and self.percent == "hundredth":
            value /= 100
        return -value if match["sign"] else value


def _plain(text: str) -> str:
    """The text without LaTeX around numbers: 1/2 for \\frac{1}{2}, 1,000 for 1{,}000."""
    text = _SPACED_DIGITS.sub("", text.translate(_SIGNS).replace("{,}", ",").replace("\\$", "$"))
    return _SPACING.sub(" ", _FRACTION.sub(_plain_fraction, text))


def _plain_fraction(match: re.Match[str]) -> str:
    above, below = match[2] or match[4], match[3] or match[5]
    sign = "-" if above.startswith("-") != below.startswith("-") else ""
    space = " " if match["after_digit"] is not None else ""  # a mixed number
    return f"{space}{sign}{above.lstrip('-')}/{below.lstrip('-')}"


def _bare(text: str) -> str:
    """The text without LaTeX, currency signs, a plus sign and outer spaces."""
    text = _plain(text).strip().strip("$€£").strip().removeprefix("+")
    return "-" + text[1:].lstrip() if text.startswith("-") else text
