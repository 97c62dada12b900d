"""Functions of several verifiers: read reference answers from rows, and answers from completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lucidrl.errors import DataError
from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.utils.config import Config

MAX_CHARS = 1_000_000
"""A longer completion is a parse failure."""

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)


class TextConfig(Config):
    """Which part of a completion is verified."""

    completion_after: str | None = None
    """Read only what follows the last occurrence of this marker, such as `</think>`. A completion without the marker is
    a parse failure."""


class AnswerConfig(TextConfig):
    """Where the reference answer is in the row."""

    answer_column: str = "answer"
    """Column of the reference answer: a string, a number, or a list of accepted answers."""
    answer_after: str | None = None
    """Use only what follows the last occurrence of this marker in the column, such as `####`."""


def text_of(completion: Completion, config: TextConfig) -> str:
    """The part of the completion that is verified.

    Raises:
        ParseFailure: if the completion is too long, or lacks the marker `completion_after`.
    """
    text = completion.text
    if len(text) > MAX_CHARS:
        raise ParseFailure(f"the completion has {len(text):,} characters; verifiers read at most {MAX_CHARS:,}")
    if config.completion_after is None:
        return text
    _, marker, rest = text.rpartition(config.completion_after)
    if not marker:
        raise ParseFailure(f"the completion does not contain {config.completion_after!r}")
    return rest


def column_of(row: Mapping[str, Any], name: str, setting: str) -> Any:
    """The value of a column.

    Args:
        setting: option of the verifier that names the column, for the error.

    Raises:
        DataError: the row has no such column, or no value in it; the message lists the columns.
    """
    if row.get(name) is not None:
        return row[name]
    has = "is empty" if name in row else "does not exist"
    columns = ", ".join(map(str, row)) or "none"
    raise DataError(
        f"column {name!r} {has}; the row has the columns {columns}; set reward.kwargs.{setting} to one of them"
    )


def references_of(row: Mapping[str, Any], config: AnswerConfig) -> list[str]:
    """The reference answers of a row as strings; a completion may match any of them.

    Raises:
        DataError: there is no answer, or it is neither a string nor a number; the message shows the value.
    """
    value = column_of(row, config.answer_column, "answer_column")
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise DataError(f"column {config.answer_column!r} is an empty list; give at least one reference answer")
    return [_reference(each, config) for each in values]


def _reference(value: Any, config: AnswerConfig) -> str:
    if not isinstance(value, str | int | float):
        what = f"column {config.answer_column!r} holds {shortened(value)} of type {type(value).__name__}"
        raise DataError(f"{what}; a reference answer must be a string or a number")
    text = str(value)
    if config.answer_after is None:
        return text
    _, marker, rest = text.rpartition(config.answer_after)
    if not marker:
        problem = f"the reference answer {shortened(text)} does not contain {config.answer_after!r}"
        raise DataError(f"{problem}; change or remove reward.kwargs.answer_after")
    return rest.strip()


def shortened(value: Any, max_chars: int = 200) -> str:
    """The `repr` of a value for an error message, cut to `max_chars`."""
    text = repr(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of all fenced blocks.

    Raises:
        ParseFailure: if the last block is not closed.
    """
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence[1].startswith(opening[1]) and not fence[2]:
            blocks.append((opening[2].lower(), text[opening.end() : fence.start()].strip("\n")))
            opening = None
    if opening is not None:
        raise ParseFailure("the last fenced block is not closed")
    return blocks


def tail(text: str, max_chars: int) -> str:
    """The last `max_chars` characters of the text, without a word that the cut splits."""
    if len(text) <= max_chars:
        return text
    cut = text[-max_chars:].split(maxsplit=1)
    return cut[1] if len(cut) > 1 else ""
