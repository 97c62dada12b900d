r"""`math`: the expression in `\boxed{}` must equal the reference answer; math-verify compares them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal

from pydantic import Field

from lucidrl.data.reading import last_boxed
from lucidrl.errors import ConfigError, DataError
from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.verifiers.reading import AnswerConfig, references_of, shortened, tail, text_of

MAX_EXPRESSION_CHARS = 2_000
"""Longer expressions are not parsed."""
SEARCHED_CHARS = 2_000
r"""Without `\boxed{}`, the answer must be in this many last characters."""
_MAX_RELATIVE_DIFFERENCE = Fraction(1, 10_000)
"""Largest relative difference of decimal numbers that count as equal; rounding alone would make 1e-7 equal 2e-7."""

_SPACING = re.compile(r"\\[,!;: ]|\\left|\\right|\\displaystyle|[$]|\\\(|\\\)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LETTERS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?:\\[dt]?frac\s*\{(?P<above>-?\d+)\}\s*\{(?P<below>-?\d+)\}|(?P<left>\d+)/(?P<right>\d+)"
    r"|(?P<decimal>\d+\.\d+|\.\d+)|(?P<integer>\d+))"
    r"(?P<unit>\s*\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}(?:\^\{?\d\}?)?|\s+[A-Za-z]{2,}[A-Za-z/. ]*(?:\^\{?\d\}?)?)?",
    re.ASCII,
)


class MathConfig(AnswerConfig):
    """Where the answer is in the completion, and how precise it must be."""

    read: Literal["boxed_or_last", "boxed"] = "boxed_or_last"
    r"""`boxed`: the last `\boxed{}`; `boxed_or_last`: without a box, the expression that math-verify finds near the end
    (after "answer is", the last formula, the last number)."""
    decimals: int = Field(default=6, ge=1, le=15)
    """Decimal numbers count as equal if they round to the same number with this many decimals, and differ by at most
    0.01 %."""


class MathVerifier:
    r"""Reward 1 if the expression equals the reference answer, otherwise 0.

    Integers and fractions are compared exactly, decimals as `MathConfig.decimals` says, words such as `\text{Evelyn}`
    as lower-case strings, everything else by math-verify. The constructor loads math-verify and sympy, so the first
    call is not slower than later ones.
    """

    def __init__(self, config: MathConfig) -> None:
        self._config = config
        _load()

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        expected = [_expected(reference) for reference in references_of(row, self._config)]
        text = text_of(completion, self._config)
        boxed = last_boxed(text)
        if boxed is None and self._config.read == "boxed":
            raise ParseFailure(r"the completion has no \boxed{}")
        found = _Found(text) if boxed is None else Term(boxed)
        return float(any(self._are_equal(reference, found) for reference in expected))

    def _are_equal(self, reference: Term, found: Term | _Found) -> bool:
        if isinstance(found, Term):
            if reference.is_text or found.is_text:
                return reference.words is not None and reference.words == found.words
            if reference.number is not None and found.number is not None:
                return self._numbers_are_equal(reference.number, found.number)
        elif reference.is_text:
            raise ParseFailure(r"the completion has no \boxed{}, which an answer in words needs")
        return self._expressions_are_equal(reference.expression, found.expression)

    def _numbers_are_equal(self, reference: Number, found: Number) -> bool:
        if reference.unit and found.unit and reference.unit != found.unit:
            return False
        if reference.value == found.value:
            return True
        return (reference.is_decimal or found.is_decimal) and self._agree(reference.value, found.value)

    def _agree(self, reference: Fraction, found: Fraction) -> bool:
        difference = abs(reference - found)
        is_close = difference <= _MAX_RELATIVE_DIFFERENCE * abs(reference)
        return is_close and round(reference, self._config.decimals) == round(found, self._config.decimals)

    def _expressions_are_equal(self, reference: Any, found: Any) -> bool:
        from math_verify import verify

        try:
            is_equal = verify(
                reference,
                found,
                float_rounding=self._config.decimals,
                timeout_seconds=None,  # it would use a signal; the pool enforces the timeout
                raise_on_error=True,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise ParseFailure(f"the answer cannot be compared with the reference: {type(error).__name__}") from error
        if is_equal and all(getattr(each, "is_Float", False) or _is_rational(each) for each in (reference, found)):
            numbers = [Fraction(str(each)) for each in (reference, found)]
            return numbers[0] == numbers[1] or self._agree(*numbers)
        return bool(is_equal)


@dataclass(frozen=True)
class Number:
    """An integer, fraction or decimal, with its unit."""

    value: Fraction
    is_decimal: bool
    unit: str


class Term:
    """An expression in LaTeX: a number, words, or an expression that math-verify parses."""

    def __init__(self, latex: str) -> None:
        if len(latex) > MAX_EXPRESSION_CHARS:
            size = f"{len(latex):,} characters"
            raise ParseFailure(f"the expression has {size}; at most {MAX_EXPRESSION_CHARS:,} are parsed")
        self._latex = latex
        self._bare = _SPACING.sub(" ", latex).strip().rstrip(".").strip()
        if not self._bare:
            raise ParseFailure("the expression is empty")

    @cached_property
    def number(self) -> Number | None:
        match = _NUMBER.fullmatch(self._bare)
        if match is None:
            return None
        above, below = match["above"] or match["left"], match["below"] or match["right"]
        if below is not None and int(below) == 0:
            return None
        value = Fraction(int(above), int(below)) if above else Fraction(match["decimal"] or match["integer"])
        unit = _TEXT.sub(r"\1", match["unit"] or "").replace(" ", "").rstrip(".").lower()
        return Number(-value if match["sign"] == "-" else value, match["decimal"] is not None, unit)

    @cached_property
    def words(self) -> str | None:
        """The text in lower case, without enclosing parentheses; None if it has other characters than letters."""
        text = _TEXT.sub(r"\1", self._bare).strip()
        if text.startswith("(") and text.endswith(")"):
            text = text[1:-1].strip()
        return " ".join(text.lower().split()) if _LETTERS.fullmatch(text) else None

    @cached_property
    def is_text(self) -> bool:
        r"""Whether the expression is words, not a product of variables: `\text{no}`, or four letters in a row."""
        if self.words is None:
            return False
        return _TEXT.search(self._bare) is not None or any(len(word) > 3 for word in self.words.split())

    @cached_property
    def expression(self) -> Any:
        """The expression as a sympy object."""
        if (expression := _parsed(f"\\boxed{{{self._latex}}}")) is None:
            raise ParseFailure(f"{shortened(self._latex, 80)} is not readable as mathematics")
        return expression


class _Found:
    """The expression that math-verify finds near the end of a text."""

    def __init__(self, text: str) -> None:
        self._text = tail(text, SEARCHED_CHARS)

    @cached_property
    def expression(self) -> Any:
        if (expression := _parsed(self._text)) is None:
            raise ParseFailure(rf"no \boxed{{}}, and no expression in the last {SEARCHED_CHARS:,} characters")
        return expression


@lru_cache(maxsize=1024)
def _expected(reference: str) -> Term:
    """Parse and check a reference answer.

    Raises:
        DataError: the answer cannot be parsed or compared; the message shows it.
    """
    try:
        boxed = last_boxed(reference)
        term = Term(reference if boxed is None else boxed)
        if not term.is_text and term.number is None:
            _check_equals_itself(term.expression)
    except ParseFailure as failure:
        remedy = "fix it, or set reward.kwargs.answer_after"
        raise DataError(f"the reference answer {shortened(reference)} is not usable: {failure}; {remedy}") from None
    return term


def _check_equals_itself(expression: Any) -> None:
    from math_verify import verify

    try:
        if verify(expression, expression, timeout_seconds=None, raise_on_error=True):
            return
    except Exception as error:
        raise ParseFailure(f"it cannot be compared ({type(error).__name__}: {error})") from None
    raise ParseFailure("it is not equal to itself")


def _is_rational(expression: Any) -> bool:
    return bool(getattr(expression, "is_Rational", False))


def _parsed(text: str) -> Any:
    """The expression that math-verify finds in the text, or None."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    found = parse(
        text,
        [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # it would use a signal; the pool enforces the timeout
    )
    return found[0] if found else None


@lru_cache(maxsize=1)
def _load() -> None:
    """Load math-verify and the modules of sympy that it imports lazily, which takes about a second."""
    try:
        import math_verify
    except ImportError as error:
        raise ConfigError('the verifier math needs math-verify; install it with pip install "lucidrl[math]"') from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    for reference, found in ((r"\frac{x}{2}+\sqrt{8}", r"2\sqrt{2}+0.5x"), ("(1,2]", "[1,2]"), (r"\{1,2\}", "2,1")):
        expressions = [_parsed(f"\\boxed{{{text}}}") for text in (reference, found)]
        math_verify.verify(*expressions, timeout_seconds=None)
