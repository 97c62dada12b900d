"""Memory of cached keys and values, in pages of a fixed number of tokens.

A sequence of tokens owns the pages that it needs, in any order. Free pages are reused, lowest first, so that the pages
in use are the first ones of a pool and one matrix product reaches all of them.

Shapes: X pages, C tokens per page, N tokens, H key heads, D head size.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch

FEWEST_PAGES = 16
"""Pages allocated first; each further allocation doubles them."""

Stored = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


def key_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which the cache stores keys.

    On a CPU, it is at least float32, so that scores are not rounded to half precision. On a GPU they are, because
    storing float32 there would take more of the memory that limits the number of rows.
    """
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


class Cells:
    """Index of N cells of a pool: page [N] and column [N], on a device."""

    def __init__(self, places: np.ndarray, page_size: int, device: torch.device):
        self._page_size = page_size
        page, column = np.divmod(places, page_size)
        self._page_N1, self._column_N1 = (torch.from_numpy(index).to(device)[:, None] for index in (page, column))
        self._lines: dict[int, torch.Tensor] = {}

    def advance(self) -> None:
        """Become the next columns of the same pages."""
        self._column_N1 = self._column_N1 + 1
        self._lines = {num_heads: lines + 1 for num_heads, lines in self._lines.items()}

    def lines(self, num_heads: int) -> torch.Tensor:
        """Return [N * H] the cells as lines of a pool seen as [X * H * C, D]."""
        if num_heads not in self._lines:
            head = torch.arange(num_heads, device=self._page_N1.device)
            line_NH = (self._page_N1 * num_heads + head) * self._page_size + self._column_N1
            self._lines[num_heads] = line_NH.flatten()
        return self._lines[num_heads]


class PagePool:
    """The pages of one size, in every layer.

    Args:
        page_size: tokens per page.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.num_allocated = 0
        """Pages that exist; each layer allocates them when it writes next."""
        self.num_moves = 0
        """Number of times that pages were moved."""
        self.owners: list[PagedTokens | None] = []
        """The sequence that owns each page; None for a free page."""
        self._free: list[int] = []
        self._stored: dict[int, Stored] = {}
        """Keys and values by layer, [X, H, C, D]: products over the columns of a page read consecutive memory."""

    @property
    def num_used(self) -> int:
        """Pages that sequences own."""
        return self.num_allocated - len(self._free)

    @property
    def extent(self) -> int:
        """The highest page in use, plus one."""
        while self.owners and self.owners[-1] is None:
            self.owners.pop()
        return len(self.owners)

    def take(self, owner: PagedTokens) -> int:
        """Give a free page to a sequence."""
        if not self._free:
            self.resize(max(FEWEST_PAGES, 2 * self.num_allocated))
        page = heapq.heappop(self._free)
        self.owners += [None] * (page + 1 - len(self.owners))
        self.owners[page] = owner
        return page

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page] = None
            heapq.heappush(self._free, page)

    def resize(self, num_pages: int) -> None:
        """Allocate this number of pages, at least those up to the highest page in use."""
        num_pages = max(num_pages, self.extent)
        self._free = [page for page in self._free if page < num_pages]
        self._free += range(self.num_allocated, num_pages)
        heapq.heapify(self._free)
        self.num_allocated = num_pages
        for layer, (keys, values) in self._stored.items():
            self._stored[layer] = self._resized(keys), self._resized(values)

    def defragment(self) -> None:
        """Move the pages in use to the front."""
        moved = [page for page in range(self.num_used, self.extent) if self.owners[page] is not None]
        if not moved:
            return
        self.num_moves += 1
        holes = [heapq.heappop(self._free) for _ in moved]
        for tensors in self._stored.values():
            for tensor in tensors:
                tensor[holes] = tensor[moved]
        for page, hole in zip(moved, holes, strict=True):
            owner = self.owners[page]
            assert owner is not None
            owner.pages[owner.pages.index(page)] = hole
            self.owners[hole], self.owners[page] = owner, None
            heapq.heappush(self._free, page)

    def cells(self, places: np.ndarray | Sequence[int], device: torch.device) -> Cells:
        """Return the cells of places [N] on the device; see `PagedTokens.places`."""
        return Cells(np.asarray(places, dtype=np.int64), self.page_size, device)

    def write(self, layer: int, cells: Cells, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [N, H, D] in N cells."""
        if layer not in self._stored:
            # Zeros, since 0 (an attention weight) times uninitialized memory may be NaN.
            keys_X, values_X = (
                new.new_zeros(self.num_allocated, new.shape[1], self.page_size, new.shape[2], dtype=dtype)
                for new, dtype in ((keys, key_dtype(keys.dtype, keys.device)), (values, values.dtype))
            )
            self._stored[layer] = keys_X, values_X
        lines = cells.lines(keys.shape[1])
        for stored, new in zip(self._stored[layer], (keys, values), strict=True):
            stored.view(-1, new.shape[2]).index_copy_(0, lines, new.reshape(-1, new.shape[2]).to(stored.dtype))

    def read(self, layer: int, cells: Cells) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [N, H, D] of N cells."""
        keys, values = (
            stored.view(-1, stored.shape[3])
            .index_select(0, cells.lines(stored.shape[1]))
            .unflatten(0, (-1, stored.shape[1]))
            for stored in self._stored[layer]
        )
        return keys, values

    def stored(self, layer: int) -> Stored:
        """Return the keys and values of all pages, [X, H, C, D] each; another tuple after the pool was resized."""
        return self._stored[layer]

    def _resized(self, stored: torch.Tensor) -> torch.Tensor:
        resized = stored.new_zeros(self.num_allocated, *stored.shape[1:])
        kept = min(len(stored), len(resized))
        resized[:kept] = stored[:kept]
        return resized


class PagedTokens:
    """A sequence of tokens whose keys and values are in a pool."""

    def __init__(self, pool: PagePool):
        self.pool = pool
        self.pages: list[int] = []
        self.num_cached = 0
        """Tokens whose keys and values are stored."""

    def extend(self, num_tokens: int) -> np.ndarray:
        """Count further tokens as cached; return the places where their keys and values belong."""
        first, self.num_cached = self.num_cached, self.num_cached + num_tokens
        while len(self.pages) * self.pool.page_size < self.num_cached:
            self.pages.append(self.pool.take(self))
        return self.places(first)

    def extend_by_one(self) -> int:
        """Count one more token as cached; return its place."""
        size, token = self.pool.page_size, self.num_cached
        if token == len(self.pages) * size:
            self.pages.append(self.pool.take(self))
        self.num_cached += 1
        return self.pages[token // size] * size + token % size

    def places(self, first: int = 0) -> np.ndarray:
        """Return where the cached tokens are, from token `first` on: page times page size plus column."""
        token, size = np.arange(first, self.num_cached), self.pool.page_size
        return np.array(self.pages, dtype=np.int64)[token // size] * size + token % size

    def rewind(self) -> None:
        """Forget the keys and values; keep the pages."""
        self.num_cached = 0

    def release(self) -> None:
        """Forget the keys and values; give back the pages."""
        self.rewind()
        self.pool.give_back(self.pages)
        self.pages = []
