"""Stop strings: each row ends at its own, found in the decoded text of its newest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

BYTES_PER_CHARACTER = 4
"""A byte-level token may hold as little as a quarter of a character."""


class StopStrings:
    """Looks for stop strings as tokens arrive.

    Args:
        common: strings that stop every row.
        own_of_row: further strings of each row (None: only the common ones).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        common: Sequence[str],
        own_of_row: Sequence[Sequence[str] | None],
    ):
        self._tokenizer = tokenizer
        self._strings_of_row = [(*common, *(own or ())) for own in own_of_row]
        self._is_empty = not any(self._strings_of_row)

    def reached(self, tokens_BN: torch.Tensor, rows: torch.Tensor, position: int) -> torch.Tensor:
        """True for each of `rows` whose text, up to the token at `position`, contains one of its strings."""
        if self._is_empty:
            return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        found = [self._contains_stop(tokens_BN[row, : position + 1], row) for row in rows.tolist()]
        return torch.tensor(found, dtype=torch.bool, device=rows.device)

    def _contains_stop(self, tokens: torch.Tensor, row: int) -> bool:
        strings = self._strings_of_row[row]
        if not strings:
            return False
        reach = BYTES_PER_CHARACTER * (max(map(len, strings)) + 1)
        text = self._tokenizer.decode(tokens[-reach:])
        return any(string in text for string in strings)
