"""Which rows have space in the key-value cache: reservations of pages, and rows that are held for later turns."""

from __future__ import annotations

import numpy as np

from lucidrl.distributed.batching import round_up
from lucidrl.models.generation.pages import PagedTokens, PagePool
from lucidrl.models.generation.rows import HeldRows, Prefix, Row

PREFIX_PAGE = 64
OWN_PAGE = 64
"""Tokens per page. Larger pages need fewer operations, but compute more unused columns."""
SMALLEST_PAGE = 16
"""Pages of a row are not larger than its longest completion, rounded up to a multiple of this."""
LARGEST_EXTENT = 5 / 4
"""Move pages together when they extend over more than this multiple of the pages in use."""


class CacheSpace:
    """The pools of the cache, and the space that rows have in them.

    A row reserves the pages that it may need at most when it starts, so that it can always go on. Shared prompts are
    reserved once. Rows that are held, and idle prompts (computed, but without a running or held row), give way to rows
    that start. Rows that run or are held and idle prompts are at most `max_rows` together.

    Args:
        max_tokens: most tokens of both pools; None = as many as these rows need.
        max_new_tokens: tokens of the longest completion.
    """

    def __init__(self, max_rows: int, max_tokens: int | None, max_new_tokens: int = OWN_PAGE):
        self.max_rows, self.max_tokens = max_rows, max_tokens
        # With a limit, all pages have one size, so that pools can give space to each other.
        own_page = OWN_PAGE if max_tokens is not None else min(OWN_PAGE, round_up(max_new_tokens, SMALLEST_PAGE))
        self.prefix_pool, self.own_pool = PagePool(PREFIX_PAGE), PagePool(own_page)
        self.held = HeldRows()
        self._num_reserved = {self.prefix_pool: 0, self.own_pool: 0}
        self._prefixes: dict[bytes, Prefix] = {}
        """Prompts that new rows may share, by their tokens."""
        self._idle: dict[Prefix, None] = {}
        """Idle prompts, oldest first; rows wait for them."""

    @property
    def num_allocated(self) -> int:
        """Tokens for which memory is allocated."""
        return sum(pool.num_allocated * pool.page_size for pool in self._num_reserved)

    def fits_alone(self, prompt_length: int, limit: int) -> bool:
        """Whether a row fits the empty cache."""
        return self.max_tokens is None or self.needed(prompt_length, limit) <= self.max_tokens

    def needed(self, prompt_length: int, limit: int) -> int:
        return round_up(prompt_length, PREFIX_PAGE) + round_up(limit, self.own_pool.page_size)

    def prefix_of(self, token_ids: np.ndarray) -> Prefix:
        """Return the prompt with these tokens, and count one more row that waits for it."""
        prefix = self._prefixes.setdefault(token_ids.tobytes(), Prefix(self.prefix_pool, token_ids))
        prefix.num_rows += 1
        return prefix

    def new_own(self) -> PagedTokens:
        return PagedTokens(self.own_pool)

    def start(self, row: Row, num_running: int) -> bool:
        """Reserve space for a row, continuing a held row if possible; return whether there is space."""
        if num_running >= self.max_rows:
            return False
        earlier = self.held.take_longest(row.ids[: row.num_tokens])
        while num_running + len(self.held) >= self.max_rows:
            self.release(self.held.take_oldest())
        if earlier is not None:
            if self._continue(row, earlier):
                return True
            self.release(earlier)
        row.prefix.num_active += 1
        self._idle.pop(row.prefix, None)
        while self._idle and num_running + len(self.held) + len(self._idle) >= self.max_rows:
            self._drop(next(iter(self._idle)))
        num_prefix = 0 if row.prefix.num_reserved else round_up(len(row.prefix.token_ids), PREFIX_PAGE)
        num_own = round_up(row.limit, self.own_pool.page_size)
        if not self._make_space(num_prefix + num_own):
            self._deactivate(row.prefix)
            return False
        row.prefix.num_reserved += num_prefix
        row.num_reserved = num_own
        self._reserve(num_prefix, num_own)
        return True

    def hold(self, row: Row) -> None:
        """Keep the keys and values of a finished row."""
        unused = row.num_reserved - round_up(row.own.num_cached, self.own_pool.page_size)
        row.num_reserved -= unused
        self._reserve(0, -unused)
        self.held.add(row)

    def release(self, row: Row) -> None:
        """Drop the keys and values of a row that runs or is held."""
        row.own.release()
        self._reserve(0, -row.num_reserved)
        row.num_reserved = 0
        self._deactivate(row.prefix)
        self.leave(row.prefix)

    def leave(self, prefix: Prefix) -> None:
        """Count one row less that uses a prompt, or waits for it; drop the prompt after its last row."""
        prefix.num_rows -= 1
        if not prefix.num_rows:
            self._drop(prefix)
            self._forget(prefix)

    def release_held(self) -> None:
        while len(self.held):
            self.release(self.held.take_oldest())

    def renew_prefixes(self) -> None:
        """Rows that start from now on share no keys and values of now."""
        for prefix in list(self._prefixes.values()):
            if prefix.num_cached:
                self._forget(prefix)

    def drop_idle(self) -> None:
        """Drop idle prompts."""
        for prefix in list(self._idle):
            self._drop(prefix)

    def tidy(self) -> None:
        """Move pages together if there are many holes."""
        for pool in self._num_reserved:
            if pool.extent > LARGEST_EXTENT * pool.num_used + 1:
                pool.defragment()

    def _continue(self, row: Row, earlier: Row) -> bool:
        """Give the keys and values of a held row to a row, if there is space for its tokens."""
        num_own = round_up(row.num_tokens - len(earlier.prefix.token_ids) + row.limit, self.own_pool.page_size)
        if not self._make_space(num_own - earlier.num_reserved):
            return False
        self._reserve(0, num_own - earlier.num_reserved)
        self.leave(row.prefix)
        row.prefix, row.own, row.num_reserved = earlier.prefix, earlier.own, num_own
        return True

    def _make_space(self, num_tokens: int) -> bool:
        """Drop held rows and idle prompts until the tokens fit; return whether they fit."""
        while self.max_tokens is not None and sum(self._num_reserved.values()) + num_tokens > self.max_tokens:
            if len(self.held):
                self.release(self.held.take_oldest())
            elif self._idle:
                self._drop(next(iter(self._idle)))
            else:
                return False
        return True

    def _reserve(self, num_prefix: int, num_own: int) -> None:
        """Change the reservations. With a limit, allocate what is reserved: pools then never grow later."""
        self._num_reserved[self.prefix_pool] += num_prefix
        self._num_reserved[self.own_pool] += num_own
        if self.max_tokens is None:
            return
        for pool, other in ((self.prefix_pool, self.own_pool), (self.own_pool, self.prefix_pool)):
            wanted = self._num_reserved[pool] // pool.page_size
            if wanted <= pool.num_allocated:
                continue
            if (wanted * pool.page_size + other.num_allocated * other.page_size) > self.max_tokens:
                other.defragment()
                other.resize(self._num_reserved[other] // other.page_size)
            room = (self.max_tokens - other.num_allocated * other.page_size) // pool.page_size
            pool.resize(max(wanted, min(room, 2 * pool.num_allocated)))

    def _deactivate(self, prefix: Prefix) -> None:
        """Count one running or held row less."""
        prefix.num_active -= 1
        if prefix.num_reserved and not prefix.num_active:
            self._idle[prefix] = None

    def _drop(self, prefix: Prefix) -> None:
        self._idle.pop(prefix, None)
        prefix.release()
        self._reserve(-prefix.num_reserved, 0)
        prefix.num_reserved = 0

    def _forget(self, prefix: Prefix) -> None:
        key = prefix.token_ids.tobytes()
        if self._prefixes.get(key) is prefix:
            del self._prefixes[key]
