"""Find the answer in a completion: environments and verifiers read it with the same functions."""

from __future__ import annotations

import re
from decimal import Decimal

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# A minus after a digit is an operator: "10-7" ends with 7.
_NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)


class ParseFailure(Exception):  # noqa: N818 - an outcome of a verifier, not an error of the program
    """The completion has nothing to verify, such as no number; the message says what is missing."""


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or None if there is none.

    Raises:
        ParseFailure: if the brace of the last box is not closed.
    """
    boxes = [match.end() for match in _BOX.finditer(text)]
    if not boxes:
        return None
    start = boxes[-1]
    depth, is_escaped = 1, False
    for position in range(start, len(text)):
        character = text[position]
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position]
    raise ParseFailure(r"the brace of the last \boxed{ is not closed")


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """The content of the last `<tag>...</tag>`, or None if there is none."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, content = before.rpartition(f"<{tag}>")
    return content if closing and opening else None


def last_number(text: str) -> Decimal | None:
    """The last plain decimal in the text, even inside a word, or None: 42 for "12 + 30 = 42.", 1000 for "1,000".

    The verifier `numeric` reads more forms, such as fractions, and leaves out digits in words.
    """
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
