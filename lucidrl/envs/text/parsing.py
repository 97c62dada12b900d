"""Reads numbers from completions."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus after a digit is an operator: "10-7" ends with 7.
_NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)


def last_number(text: str) -> Decimal | None:
    """The last number in the text, or None: 42 for "12 + 30 = 42.", 1000 for "1,000"."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
