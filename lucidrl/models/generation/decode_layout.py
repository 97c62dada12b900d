"""The layout of a decoding step: one new token per row.

A step computes attention for each page of the cache separately, with the queries of all rows that have the page. Then
it merges the results of the pages of each row. One product serves all rows, whatever their lengths, and reads a shared
prefix once.

Shapes: B rows, S sequences, X pages, C columns of a page, G most rows per sequence, M most pages per sequence,
Hq/Hkv heads, Q query heads per key head, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from lucidrl.distributed.batching import round_up
from lucidrl.models.attention import AttentionCall, soft_cap
from lucidrl.models.generation.kv_cache import CachedRow
from lucidrl.models.generation.pages import PagedTokens, Stored, key_dtype

COLUMNS_PER_VECTOR = 16
"""The number of columns in a product is a multiple of this: on CPUs with vectors of 16 float32, other numbers take up
to eight times as long."""


class DecodeLayout:
    """A decoding step: one new token per row, whose key and value are stored.

    Args:
        rows: all tokens but the new one are cached. They change: the new token counts as cached.
    """

    def __init__(self, rows: Sequence[CachedRow], device: torch.device):
        self._rows, self._device = list(rows), device
        places = [row.own.extend_by_one() for row in rows]
        self._own_pool = rows[0].own.pool
        self._new_cells_B = self._own_pool.cells(places, device)
        prefix_length_B = _ints((row.prefix.num_cached for row in rows), len(rows))
        self._lengths = [row.own.num_cached for row in rows]
        self.position_B = prefix_length_B + np.array(self._lengths) - 1
        """Positions of the new tokens."""
        number_of = {prefix: number for number, prefix in enumerate(dict.fromkeys(row.prefix for row in rows))}
        prefix_of_B = _ints((number_of[row.prefix] for row in rows), len(rows))
        starts = np.zeros(len(number_of), dtype=np.int64)
        self._own = _Pages([row.own for row in rows], np.arange(len(rows)), prefix_length_B, self.position_B, device)
        self._prefixes = _Pages(list(number_of), prefix_of_B, starts, self.position_B, device)

    def advance(self, rows: Sequence[CachedRow]) -> bool:
        """Become the layout of the next token of the same rows; return False if they, or their pages, have changed.

        Callers drop the layout if keys and values of the rows are computed again.
        """
        size = self._own_pool.page_size
        is_same = (
            rows == self._rows
            and all(row.own.num_cached == length for row, length in zip(rows, self._lengths, strict=True))
            and not any(length % size == 0 for length in self._lengths)
            and self._own.are_in_place
            and self._prefixes.are_in_place
        )
        if not is_same:
            return False
        for row in rows:
            row.own.extend_by_one()
        self._lengths = [length + 1 for length in self._lengths]
        self._new_cells_B.advance()
        self.position_B = self.position_B + 1
        self._own.advance(self.position_B, are_filled=True)
        self._prefixes.advance(self.position_B, are_filled=False)
        return True

    @property
    def position_ids(self) -> torch.Tensor:
        """[B, 1]"""
        return torch.from_numpy(self.position_B).to(self._device)[:, None]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        num_rows, num_query_heads, _, size = call.query.shape
        num_heads = call.key.shape[1]
        self._own_pool.write(call.layer, self._new_cells_B, call.key[:, :, 0], call.value[:, :, 0])
        query = call.query.reshape(num_rows, num_heads, num_query_heads // num_heads, size)
        query = query.to(key_dtype(query.dtype, query.device))
        own, own_scale = self._own.attend(call, query)
        prefix, prefix_scale = self._prefixes.attend(call, query)
        output = torch.lerp(prefix, own, torch.sigmoid(own_scale - prefix_scale).unsqueeze(-1))
        return output.reshape(num_rows, 1, num_query_heads, -1).to(call.query.dtype)


class _Pages:
    """The pages of some sequences, to which the rows of a decoding step attend.

    A page is computed once for all rows that have it: the grid [X, G] has a cell for each page and each of its rows.

    Args:
        sequences: their last page may be filled in part.
        sequence_of_B: index of the sequence of each row; all sequences have rows.
        start_S: position of the first token of each sequence.
        position_B: position of the new token of each row.
    """

    def __init__(
        self,
        sequences: Sequence[PagedTokens],
        sequence_of_B: np.ndarray,
        start_S: np.ndarray,
        position_B: np.ndarray,
        device: torch.device,
    ):
        self._pool, self._device = sequences[0].pool, device
        self._num_moves = self._pool.num_moves
        size, num_pages, num_rows = self._pool.page_size, self._pool.extent, len(sequence_of_B)
        pages_S = _ints((len(sequence.pages) for sequence in sequences), len(sequences))
        page = _ints(chain.from_iterable(sequence.pages for sequence in sequences), int(pages_S.sum()))
        sequence_of_page, number_in_sequence = np.repeat(np.arange(len(pages_S)), pages_S), _counted_up(pages_S)
        cached_S = _ints((sequence.num_cached for sequence in sequences), len(sequences))
        self._filled_X, self._start_X = np.zeros((2, num_pages), dtype=np.int64)
        """Tokens in each page, and the position of its first token."""
        self._filled_X[page] = (cached_S[sequence_of_page] - number_in_sequence * size).clip(0, size)
        self._start_X[page] = start_S[sequence_of_page] + number_in_sequence * size
        self._filling_S = page[pages_S.cumsum() - 1]
        """The page of each sequence that is filled next."""

        rows_S, cell_B = np.bincount(sequence_of_B), np.empty(num_rows, np.int64)
        cell_B[np.argsort(sequence_of_B, kind="stable")] = _counted_up(rows_S)
        row_SG = np.zeros((len(rows_S), rows_S.max()), dtype=np.int64)
        row_SG[sequence_of_B, cell_B] = np.arange(num_rows)
        self._row_XG = np.zeros((num_pages, row_SG.shape[1]), dtype=np.int64)
        self._row_XG[page] = row_SG[sequence_of_page]
        self._row_of_cell = self._index(self._row_XG.ravel(), num_rows)

        page_SM = np.full((len(pages_S), pages_S.max()), -1)
        page_SM[sequence_of_page, number_in_sequence] = page
        page_BM = page_SM[sequence_of_B]
        self._items_shape = page_BM.shape
        cell_BM = page_BM.clip(0) * self._row_XG.shape[1] + cell_B[:, None]
        self._item = self._index(cell_BM.ravel(), self._row_XG.size)
        """Index of the cell of each page of each row, [B * M]; None for all cells in order."""
        self._has_no_item = torch.from_numpy(page_BM < 0).to(device)[..., None, None]
        """[B, M, 1, 1], True where a row has fewer than M pages."""
        self._num_columns = 0
        """Columns that are computed."""
        self._masks: dict[tuple[int | None, torch.Size, torch.dtype], torch.Tensor] = {}
        self._views: dict[int, tuple[Stored, torch.Tensor, torch.Tensor]] = {}
        """By layer: the memory of the pool, and keys and values as products use them."""
        self.advance(position_B, are_filled=False)

    @property
    def are_in_place(self) -> bool:
        """Whether the pool has neither moved pages nor removed some of those that are computed."""
        return self._pool.num_moves == self._num_moves and self._pool.num_allocated >= len(self._row_XG)

    def advance(self, position_B: np.ndarray, are_filled: bool) -> None:
        """Note the positions of the new tokens.

        Args:
            are_filled: whether each sequence has one more token, in the same page.
        """
        if are_filled:
            self._filled_X[self._filling_S] += 1
        self._position_B = position_B
        num_columns = min(self._pool.page_size, round_up(int(self._filled_X.max()), COLUMNS_PER_VECTOR))
        if num_columns != self._num_columns:
            self._num_columns, self._views = num_columns, {}
        if are_filled or any(window is not None for window, *_ in self._masks):
            self._masks.clear()

    def attend(self, call: AttentionCall, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the pages of each row with the queries [B, Hkv, Q, D]; return the output [B, Hkv, Q, Dv], and the
        log-sum-exp of the scores [B, Hkv, Q]."""
        num_pages, num_cells = self._row_XG.shape
        cells = query if self._row_of_cell is None else query.index_select(0, self._row_of_cell)
        # A page is attended to by all queries of its rows together: [X, G, Hkv, Q, D] becomes [X, Hkv, G * Q, D].
        queries = cells.view(num_pages, num_cells, *query.shape[1:]).transpose(1, 2).flatten(2, 3)
        keys, values = self._keys_and_values(call.layer)
        output, scale = attend_to_block(call, queries, keys, values, self._mask(call.window, queries, query.shape[2]))
        if num_cells > 1:
            output, scale = (
                tensor.unflatten(2, (num_cells, -1)).transpose(1, 2).flatten(0, 1) for tensor in (output, scale)
            )
        if self._item is not None:
            output, scale = output.index_select(0, self._item), scale.index_select(0, self._item)
        if self._items_shape[1] == 1:
            return output, scale
        scale = scale.unflatten(0, self._items_shape).masked_fill(self._has_no_item, _no_weight(scale.dtype))
        weights, total = _normalized(scale, dim=1)
        parts = output.unflatten(0, self._items_shape) * weights.unsqueeze(-1)
        return parts.sum(dim=1), total

    def _keys_and_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the computed columns, [X * Hkv, C, D]."""
        stored = self._pool.stored(layer)
        if layer not in self._views or self._views[layer][0] is not stored:  # the pool has other memory after a resize
            computed = slice(len(self._row_XG)), slice(None), slice(self._num_columns)
            keys, values = (tensor[computed].flatten(0, 1) for tensor in stored)
            self._views[layer] = stored, keys, values
        _, keys, values = self._views[layer]
        return keys, values

    def _mask(self, window: int | None, queries: torch.Tensor, num_queries: int) -> torch.Tensor:
        """Return what to add to the scores of the queries [X, Hkv, G * Q, D]: [X * Hkv, G * Q or 1, C]."""
        if window is not None and window > self._position_B.max():
            window = None
        key = window, queries.shape, queries.dtype
        if key not in self._masks:
            column = np.arange(self._num_columns)
            visible_XGC = (column < self._filled_X[:, None])[:, None]
            if window is not None:
                position_XGC = (self._start_X[:, None] + column)[:, None]
                visible_XGC = visible_XGC & (position_XGC > (self._position_B[self._row_XG] - window)[..., None])
                visible_XGC = visible_XGC.repeat(num_queries, axis=1)
            hidden = torch.from_numpy(~visible_XGC).to(self._device)[:, None].expand(-1, queries.shape[1], -1, -1)
            mask = torch.zeros(hidden.flatten(0, 1).shape, dtype=queries.dtype, device=self._device)
            self._masks[key] = mask.masked_fill_(hidden.flatten(0, 1), _no_weight(queries.dtype))
        return self._masks[key]

    def _index(self, index: np.ndarray, size: int) -> torch.Tensor | None:
        """Return the index on the device; None if it selects all of `size` items in order."""
        if len(index) == size and np.array_equal(index, np.arange(size)):
            return None
        return torch.from_numpy(index).to(self._device)


def attend_to_block(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a part of the keys: return the output [X, Hkv, Q, Dv] and the log-sum-exp of the scores [X, Hkv, Q], in
    at least float32.

    Args:
        query: [X, Hkv, Q, D].
        key: [X * Hkv, C, D], as `value`.
        mask: added to the scores [X * Hkv, Q, C].
    """
    shape, query = query.shape[:3], query.flatten(0, 1)
    if call.softcap is None:
        scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=call.scaling)
    else:
        scores = soft_cap(torch.bmm(query, key.transpose(1, 2)) * call.scaling, call.softcap) + mask
    weights, total = _normalized(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1)
    output = torch.bmm(weights.to(value.dtype), value).to(weights.dtype)
    return output.view(*shape, -1), total.view(shape)


def _normalized(scores: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax and the log-sum-exp over a dim."""
    weights = torch.softmax(scores, dim=dim)
    # The largest weight is 1 / sum(exp(score - largest score)); this is faster than another sum of exponentials.
    return weights, scores.amax(dim=dim) - torch.log(weights.amax(dim=dim))


def _no_weight(dtype: torch.dtype) -> float:
    """Return a score without weight. It is finite: where no key is visible, results are finite too, and get no weight
    in turn."""
    return torch.finfo(dtype).min / 4


def _counted_up(counts: np.ndarray) -> np.ndarray:
    """Return 0 to n - 1 for each count n, one after the other."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)


def _ints(values: Iterable[int], count: int) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64, count=count)
