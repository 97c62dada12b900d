"""`choice`: the completion must name the right option of a multiple-choice question."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from lucidrl.data.reading import last_boxed, last_tagged
from lucidrl.errors import DataError
from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.verifiers.reading import (
    AnswerConfig,
    column_of,
    references_of,
    shortened,
    tail,
    text_of,
)

SEARCHED_CHARS = 20_000
"""Outside of a box or tag, the option must be named in this many last characters."""

_WRAPPING = "*_`()[]{}$.:;, \t\n\"'"
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")


class ChoiceConfig(AnswerConfig):
    """The options, and the form of the reference answer."""

    letters: str = Field(default="ABCDE", min_length=2)
    """Letters of the options, in order."""
    answer_format: Literal["letter", "index", "text"] = "letter"
    """Form of the reference answer: the letter, the index (from 0) or the text of the option."""
    choices_column: str | None = None
    """Column with the texts of the options: a list, or a mapping by letter. With this column, a completion may
    name an option by its text. Required for `answer_format=text`."""

    @field_validator("letters")
    @classmethod
    def _distinct(cls, letters: str) -> str:
        if not letters.isalpha() or len(set(letters.upper())) < len(letters):
            raise ValueError(f"{letters!r} is not valid; it must be letters, each different, such as ABCD")
        return letters.upper()


class ChoiceVerifier:
    r"""Reward 1 for the right option, otherwise 0.

    A completion names its option in one of these forms; the first form that occurs counts, at its last occurrence:
    `\boxed{B}`, `<answer>B</answer>`, "answer is (B)" or "Answer: B", a last line such as "B", "(B)", "**B.** text", or
    the text of an option as the last line.
    """

    def __init__(self, config: ChoiceConfig) -> None:
        self._config = config
        some = f"[{config.letters}]"
        lead = r"(?i:answer|option|choice)(?i:\s+is|\s*[:=])*[\s:*_`$\"']*"
        self._stated = re.compile(rf"{lead}[(\[]?({some})[)\]]?(?![\w'])")
        self._second = re.compile(rf"[\s*_.)\]]*(?:,|/|&|\bor\b|\band\b)\s*[*_(\[]*{some}(?![\w'])")
        self._line = re.compile(rf"[*_`(\[$\"']*({some})(?:[*_`)\]$\"']*[.:)\]]+(?:[*_`\s].*)?|[*_`)\]$\"']*)")

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        options = self._options(row)
        expected = {self._expected(reference, options) for reference in references_of(row, self._config)}
        return float(self._read(text_of(completion, self._config), options) in expected)

    def answer(self, completion: Completion, row: Mapping[str, Any]) -> str:
        """Return the letter of the option that the completion names."""
        return self._read(text_of(completion, self._config), self._options(row))

    def _options(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Texts of the options by letter; empty without `choices_column`."""
        config = self._config
        if config.choices_column is None:
            if config.answer_format == "text":
                raise DataError("answer_format=text needs the texts of the options; set reward.kwargs.choices_column")
            return {}
        choices = column_of(row, config.choices_column, "choices_column")
        if isinstance(choices, Mapping) and "text" in choices and "label" in choices:
            choices = dict(zip(choices["label"], choices["text"], strict=True))
        if isinstance(choices, Mapping):
            pairs = {str(letter).upper(): str(text) for letter, text in choices.items()}
        elif isinstance(choices, list | tuple):
            pairs = dict(zip(config.letters, map(str, choices), strict=False))
        else:
            what = f"column {config.choices_column!r} holds {shortened(choices)}"
            raise DataError(f"{what}; it must be a list of strings, or a mapping from letters to strings")
        if len(pairs) < len(choices) or not pairs.keys() <= set(config.letters):
            problem = f"the options {shortened(choices)} do not fit the letters {config.letters}"
            raise DataError(f"{problem}; set reward.kwargs.letters")
        return pairs

    def _expected(self, reference: str, options: Mapping[str, str]) -> str:
        config = self._config
        known = options or dict.fromkeys(config.letters, "")
        if config.answer_format == "text":
            letter = self._by_text(reference, options)
        elif config.answer_format == "index":
            number = int(reference) if reference.strip().isdecimal() and len(reference) < 4 else len(known)
            letter = list(known)[number] if number < len(known) else None
        else:
            letter = reference.strip(_WRAPPING).upper()
        if letter is None or letter not in known:
            rule = f"it must be the {config.answer_format} of one of the options {', '.join(known)}"
            raise DataError(f"the reference answer {shortened(reference)} is not valid; {rule}")
        return letter

    def _read(self, text: str, options: Mapping[str, str]) -> str:
        for content in (last_boxed(text), last_tagged(text)):
            if content is not None:
                return self._named(content, options)
        text = tail(text, SEARCHED_CHARS)
        if stated := list(self._stated.finditer(text)):
            if self._second.match(text, stated[-1].end()):
                raise ParseFailure("the completion names several options")
            return stated[-1][1]
        lines = text.strip().splitlines()
        if lines and (letter := self._of_line(lines[-1].strip(), options)):
            return letter
        raise ParseFailure(f"the completion names none of the options {', '.join(options or self._config.letters)}")

    def _named(self, content: str, options: Mapping[str, str]) -> str:
        """Letter of the option that the content of a box or tag names."""
        content = _TEXT.sub(r"\1", content)
        if letter := self._of_line(content.strip(), options):
            return letter
        raise ParseFailure(f"{shortened(content, 50)} names none of the options {', '.join(self._config.letters)}")

    def _of_line(self, line: str, options: Mapping[str, str]) -> str | None:
        by_text = self._by_text(line, options)
        if by_text is None and (match := self._line.fullmatch(line)):
            return match[1]
        return by_text

    def _by_text(self, text: str, options: Mapping[str, str]) -> str | None:
        """Letter of the option with this text; None if no option or several have it."""
        found = [letter for letter, option in options.items() if _normalized(option) == _normalized(text)]
        return found[0] if len(found) == 1 else None


def _normalized(text: str) -> str:
    return " ".join(text.casefold().split()).strip(_WRAPPING)
