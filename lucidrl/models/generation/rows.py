"""The rows of the built-in engine: requests with the tokens sampled so far and their place in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from lucidrl.models.generation.interfaces import Completion, GenerationRequest
from lucidrl.models.generation.kv_cache import CachedRow
from lucidrl.models.generation.pages import PagedTokens, PagePool


class Prefix(PagedTokens):
    """A prompt, whose keys and values its rows share."""

    def __init__(self, pool: PagePool, token_ids: np.ndarray):
        super().__init__(pool)
        self.token_ids = token_ids
        self.last_hidden: torch.Tensor | None = None
        """[D] last hidden state at the last token, once the whole prompt is computed."""
        self.num_rows = 0
        """Rows that wait for the prompt, run or are held."""
        self.num_active = 0
        """Rows that run or are held."""
        self.num_reserved = 0
        """Tokens reserved in the cache."""

    @property
    def num_missing(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.token_ids) - self.num_cached

    def rewind(self) -> None:
        super().rewind()
        self.last_hidden = None


@dataclass(eq=False)
class Row(CachedRow):
    """A request that waits, runs or is held."""

    prefix: Prefix
    request: GenerationRequest
    limit: int
    """Most new tokens."""
    ids: np.ndarray
    """The prompt, then space for `limit` tokens."""
    num_tokens: int
    """Tokens of the prompt and those sampled so far."""
    version: int
    """Version of the weights that sample the next token."""
    num_prompt: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    truncated: bool = False
    num_reserved: int = 0
    """Tokens reserved in the cache, without the prefix."""

    newest: int = 0
    """The last token."""

    def __post_init__(self) -> None:
        self.num_prompt, self.newest = self.num_tokens, int(self.ids[self.num_tokens - 1])

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)

    @property
    def num_pending(self) -> int:
        """Tokens without keys and values in the cache."""
        return self.num_tokens - self.num_cached

    def newest_tokens(self, most: int) -> np.ndarray:
        """Return up to `most` sampled tokens, the newest last."""
        return self.ids[max(self.num_prompt, self.num_tokens - most) : self.num_tokens]

    def add(self, token: int, logprob: float) -> None:
        self.ids[self.num_tokens] = self.newest = token
        self.num_tokens += 1
        self.logprobs.append(logprob)
        self.versions.append(self.version)

    def restart(self) -> None:
        """Forget the sampled tokens."""
        self.num_tokens, self.newest = self.num_prompt, int(self.ids[self.num_prompt - 1])
        self.logprobs, self.versions = [], []

    def completion(self) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            token_ids=torch.from_numpy(self.ids[self.num_prompt : self.num_tokens].copy()),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            policy_versions=torch.tensor(self.versions, dtype=torch.int64),
            truncated=self.truncated,
        )


class HeldRows:
    """Finished rows whose keys and values may serve a later turn, oldest first."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, bytes], list[Row]] = {}
        """By the number and the content of the cached tokens."""
        self._order: dict[Row, tuple[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, row: Row) -> None:
        key = row.num_cached, row.ids[: row.num_cached].tobytes()
        self._rows.setdefault(key, []).append(row)
        self._order[row] = key

    def take_longest(self, token_ids: np.ndarray) -> Row | None:
        """Remove and return a row whose cached tokens are the most first tokens of `token_ids`, but not all of them."""
        for length in sorted({length for length, _ in self._rows if length < len(token_ids)}, reverse=True):
            if found := self._rows.get((length, token_ids[:length].tobytes())):
                return self._removed(found[0])
        return None

    def take_oldest(self) -> Row:
        """Remove and return the row that was held first."""
        return self._removed(next(iter(self._order)))

    def _removed(self, row: Row) -> Row:
        key = self._order.pop(row)
        self._rows[key].remove(row)
        if not self._rows[key]:
            del self._rows[key]
        return row
