"""The text of single tokens, for people who read samples token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # what a tokenizer decodes a part of a character to


class TokenTexts:
    """Decodes tokens one by one, with the spaces that they have inside a text; caches the text of each token.

    Example:
        >>> TokenTexts(tokenizer)([4340, 525, 30])
        ['How', ' are', '?']
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers strip the space before the first token, so another token comes first.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._start = len(self._decode([]))
        self._texts: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token; of tokens that only together are a character, the first has the whole text."""
        texts: list[str] = []
        for is_incomplete, run in groupby(token_ids, lambda token: _INCOMPLETE in self._text(token)):
            ids = list(run)
            if is_incomplete:
                texts += [self._decode(ids)[self._start :], *[""] * (len(ids) - 1)]
            else:
                texts += map(self._text, ids)
        return texts

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._decode([token_id])[self._start :]
        return self._texts[token_id]

    def _decode(self, token_ids: list[int]) -> str:
        ids = [*self._before, *token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
