"""Key-value cache: the layouts that fill it with prompts and that decode with it.

A row consists of a prefix, whose keys and values rows with the same prompt share, and of tokens after it. Both are in
pages. A decoding step attends to each page apart, with the queries of all rows that have the page, and merges the
results of a row's pages: one product serves all rows, whatever their lengths, and reads a shared prefix once.

The place of a key says nothing about its position: the position is in its rotary embedding.

Shapes: B rows, X pages, C tokens per page, G most rows per prefix, M most pages per row, S packed tokens, Hq/Hkv heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from lucidrl.distributed.packing import PackedRows, pack_rows
from lucidrl.models.attention import (
    AttentionCall,
    AttentionLayout,
    PackedLayout,
    attend_from_end,
    causal_attention,
    soft_cap,
)
from lucidrl.models.generation.pages import PagedTokens, PagePool

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(eq=False)
class CachedRow:
    """Where the keys and values of a row are."""

    prefix: PagedTokens
    own: PagedTokens

    @property
    def num_cached(self) -> int:
        return self.prefix.num_cached + self.own.num_cached


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a sequence, whose keys and values are to be computed."""

    token_ids: np.ndarray
    """[N] int64"""
    tokens: PagedTokens
    """The sequence, with the keys and values of the tokens before the chunk."""
    prefix: PagedTokens | None = None
    """What comes before the sequence."""

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.tokens.num_cached + (self.prefix.num_cached if self.prefix is not None else 0)


@dataclass(frozen=True)
class PrefillBatch:
    """A forward call over chunks of prompts, one after the other."""

    input_ids: torch.Tensor
    """[1, S]"""
    position_ids: torch.Tensor
    """[1, S]"""
    last: torch.Tensor
    """[chunks] index of the last token of each chunk."""
    layout: AttentionLayout

    @classmethod
    def of(cls, chunks: Sequence[Chunk], device: torch.device) -> PrefillBatch:
        """Make the call that computes the chunks; count their tokens as cached.

        Either all chunks start at position 0, or all start later.
        """
        lengths = [len(chunk.token_ids) for chunk in chunks]
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        if chunks[0].start == 0:
            sequences = [torch.from_numpy(chunk.token_ids) for chunk in chunks]
            padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(device)
            rows = pack_rows(padded, torch.tensor(lengths, device=device))
            places = np.concatenate([chunk.tokens.extend(len(chunk.token_ids)) for chunk in chunks])
            layout = PrefillLayout(rows, chunks[0].tokens.pool, places)
            return cls(rows.input_ids, rows.position_ids, last, layout)
        ids = np.concatenate([chunk.token_ids for chunk in chunks])
        positions = np.concatenate([chunk.start + np.arange(len(chunk.token_ids)) for chunk in chunks])
        input_ids, position_ids = (torch.from_numpy(values).to(device)[None] for values in (ids, positions))
        return cls(input_ids, position_ids, last, ContinuationLayout(chunks, device))


class PrefillLayout(PackedLayout):
    """A packed batch of sequences from position 0 on; stores their keys and values."""

    def __init__(self, rows: PackedRows, pool: PagePool, places_S: np.ndarray):
        super().__init__(rows)
        self._pool, self._cells_S = pool, pool.cells(places_S, rows.input_ids.device)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self._pool.write(call.layer, self._cells_S, *(new[0].transpose(0, 1) for new in (call.key, call.value)))
        return self.repacked(causal_attention(self.padded(call)))


class ContinuationLayout:
    """A stream of chunks that continue cached sequences; each attends to its sequence, and is stored."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device):
        self._parts = []
        for chunk in chunks:
            earlier = [chunk.tokens] if chunk.prefix is None else [chunk.prefix, chunk.tokens]
            reads = [
                (tokens.pool, tokens.pool.cells(tokens.places(), device)) for tokens in earlier if tokens.num_cached
            ]
            num_new, pool = len(chunk.token_ids), chunk.tokens.pool
            self._parts.append((reads, pool, pool.cells(chunk.tokens.extend(num_new), device), num_new))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        outputs, start = [], 0
        for reads, pool, new, num_new in self._parts:
            part = slice(start, start + num_new)
            start = part.stop
            own = [tensor[0, :, part].transpose(0, 1) for tensor in (call.key, call.value)]
            pool.write(call.layer, new, *own)
            earlier = [earlier_pool.read(call.layer, cells) for earlier_pool, cells in reads]
            key, value = (
                torch.cat((*parts, last)).transpose(0, 1)[None]
                for *parts, last in zip(*earlier, own, strict=True)  # keys, then values
            )
            outputs.append(attend_from_end(replace(call, query=call.query[:, :, part], key=key, value=value)))
        return torch.cat(outputs, dim=2).transpose(1, 2)


class DecodeLayout:
    """A decoding step: one new token per row, whose key and value are stored.

    Args:
        rows: all tokens but the new one are cached. They change: the new token counts as cached.
    """

    def __init__(self, rows: Sequence[CachedRow], device: torch.device):
        self._device = device
        new_places = [row.own.extend_by_one() for row in rows]
        self._own_pool, self._prefix_pool = rows[0].own.pool, rows[0].prefix.pool
        self._new_cells_B = self._own_pool.cells(new_places, device)
        self.position_B = _ints((row.num_cached - 1 for row in rows), len(rows))
        """Positions of the new tokens."""
        self._index_own(rows)
        self._index_prefixes(rows)
        self._views: dict[int | None, _View] = {}
        own_rows = torch.from_numpy(self._row_of_own_X)
        self._own_rows = None if torch.equal(own_rows, torch.arange(len(rows))) else own_rows.to(device)
        self._prefix_rows = torch.from_numpy(self._row_of_prefix_XG.ravel()).to(device)

    @property
    def position_ids(self) -> torch.Tensor:
        """[B, 1]"""
        return torch.from_numpy(self.position_B).to(self._device)[:, None]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        rows, query_heads, _, size = call.query.shape
        heads = call.key.shape[1]
        self._own_pool.write(call.layer, self._new_cells_B, call.key[:, :, 0], call.value[:, :, 0])
        view = self._view(call.window, call.query.dtype)
        query = call.query.reshape(rows, heads, query_heads // heads, size)

        own_query = query if self._own_rows is None else query.index_select(0, self._own_rows)
        keys, values = self._own_pool.blocks(call.layer, len(self._row_of_own_X))
        own, own_scale = attend_to_block(replace(call, query=own_query, key=keys, value=values), view.own_mask)

        shape = self._row_of_prefix_XG.shape
        queries = query.index_select(0, self._prefix_rows).unflatten(0, shape).transpose(1, 2).flatten(2, 3)
        keys, values = self._prefix_pool.blocks(call.layer, shape[0])
        call = replace(call, query=queries, key=keys, value=values)
        shared, shared_scale = attend_to_block(call, view.prefix_mask(query.shape[2]))
        shared, shared_scale = (
            tensor.unflatten(2, (shape[1], -1)).transpose(1, 2).flatten(0, 1) for tensor in (shared, shared_scale)
        )

        parts = torch.cat((own, shared)).flatten(1, 2)
        scales = torch.cat((own_scale, shared_scale)).flatten(1, 2)
        return view.merged(parts, scales)[:, None]

    def _index_own(self, rows: Sequence[CachedRow]) -> None:
        """Find row and position of each page of own tokens."""
        counts_B = _ints((len(row.own.pages) for row in rows), len(rows))
        pages = _ints(chain.from_iterable(row.own.pages for row in rows), int(counts_B.sum()))
        row_of_page = np.repeat(np.arange(len(rows)), counts_B)
        number_in_row = _counted_up(counts_B)
        self._own_BM = np.full((len(rows), int(counts_B.max())), -1)
        self._own_BM[row_of_page, number_in_row] = pages
        self._newest_B = pages[counts_B.cumsum() - 1]
        """The page of the new token of each row; it is always visible."""
        self._row_of_own_X = np.zeros(self._own_pool.extent, dtype=np.int64)
        self._row_of_own_X[pages] = row_of_page
        # Unused pages start after every position, so that nothing in them is visible.
        self._own_start_X = np.full(len(self._row_of_own_X), np.iinfo(np.int64).max // 2)
        prefix_length_B = _ints((row.prefix.num_cached for row in rows), len(rows))
        self._own_start_X[pages] = prefix_length_B[row_of_page] + number_in_row * self._own_pool.page_size

    def _index_prefixes(self, rows: Sequence[CachedRow]) -> None:
        """Find the rows and the length of each page of prefixes."""
        number_of = {prefix: number for number, prefix in enumerate(dict.fromkeys(row.prefix for row in rows))}
        prefix_of_B = _ints((number_of[row.prefix] for row in rows), len(rows))
        rows_P, cell_B = np.bincount(prefix_of_B), np.empty(len(rows), np.int64)
        cell_B[np.argsort(prefix_of_B, kind="stable")] = _counted_up(rows_P)
        most_rows, size = int(rows_P.max()), self._prefix_pool.page_size

        counts_P = _ints((len(prefix.pages) for prefix in number_of), len(number_of))
        pages = _ints(chain.from_iterable(prefix.pages for prefix in number_of), int(counts_P.sum()))
        prefix_of_page, number_in_prefix = np.repeat(np.arange(len(counts_P)), counts_P), _counted_up(counts_P)
        rows_PG = np.zeros((len(rows_P), most_rows), dtype=np.int64)
        rows_PG[prefix_of_B, cell_B] = np.arange(len(rows))
        self._row_of_prefix_XG = np.zeros((self._prefix_pool.extent, most_rows), dtype=np.int64)
        self._row_of_prefix_XG[pages] = rows_PG[prefix_of_page]
        self._prefix_start_X, self._prefix_length_X = np.zeros((2, self._prefix_pool.extent), dtype=np.int64)
        self._prefix_start_X[pages] = number_in_prefix * size
        length_P = _ints((prefix.num_cached for prefix in number_of), len(number_of))
        self._prefix_length_X[pages] = np.minimum(length_P[prefix_of_page] - number_in_prefix * size, size)
        pages_PM = np.full((len(counts_P), int(counts_P.max())), -1)
        pages_PM[prefix_of_page, number_in_prefix] = pages
        pages_BM = pages_PM[prefix_of_B]
        self._prefix_BM = np.where(pages_BM >= 0, pages_BM * most_rows + cell_B[:, None], -1)
        """Index of each page of a row in the flattened [X, G] grid."""

    def _view(self, window: int | None, dtype: torch.dtype) -> _View:
        """Return what rows see in layers with this window."""
        if window is not None and window > self.position_B.max():
            window = None
        if window not in self._views:
            self._views[window] = self._new_view(window, dtype)
        return self._views[window]

    def _new_view(self, window: int | None, dtype: torch.dtype) -> _View:
        own_column, column = np.arange(self._own_pool.page_size), np.arange(self._prefix_pool.page_size)
        position_X1 = self.position_B[self._row_of_own_X][:, None]
        own_position_XC = self._own_start_X[:, None] + own_column
        own_XC = own_position_XC <= position_X1
        prefix_XGC = (column < self._prefix_length_X[:, None])[:, None]
        num_own, num_prefix = len(own_XC), self._row_of_prefix_XG.size
        nothing = num_own + num_prefix  # an item that weighs nothing
        prefix_BM = np.where(self._prefix_BM >= 0, num_own + self._prefix_BM, nothing)
        item_BM = np.concatenate((np.where(self._own_BM >= 0, self._own_BM, nothing), prefix_BM), axis=1)
        if window is not None:
            first_X1 = position_X1 - window + 1
            own_XC &= own_position_XC >= first_X1
            position_XG1 = self.position_B[self._row_of_prefix_XG][..., None]
            prefix_position_X1C = (self._prefix_start_X[:, None] + column)[:, None]
            prefix_XGC = prefix_XGC & (prefix_position_X1C > position_XG1 - window)
            has_visible = np.concatenate((own_XC.any(-1), prefix_XGC.any(-1).ravel(), [False]))
            item_BM = np.where(has_visible[item_BM], item_BM, nothing)
        part_BM = np.where(item_BM == nothing, self._newest_B[:, None], item_BM)
        own_mask, prefix_mask = (
            torch.where(torch.from_numpy(visible).to(self._device), 0.0, float("-inf")).to(dtype)
            for visible in (own_XC, prefix_XGC)
        )
        item, part = (torch.from_numpy(index.ravel()).to(self._device) for index in (item_BM, part_BM))
        return _View(own_mask[:, None, None], prefix_mask, item, part, item_BM.shape)


@dataclass
class _View:
    """What the rows of a decoding step see, in layers with the same window. Items are the pages of own tokens, then the
    cells of the grid [X, G] of prefixes."""

    own_mask: torch.Tensor
    """[X, 1, 1, C] to add to scores."""
    prefix_mask_XGC: torch.Tensor
    """G is 1 if all rows of a prefix see the same."""
    item: torch.Tensor
    """[B * M] the items of each row; the number of all items stands for one that weighs nothing."""
    part: torch.Tensor
    """[B * M] the same, but the row's newest page stands for items that weigh nothing."""
    shape: tuple[int, ...]
    """[B, M]"""

    def prefix_mask(self, queries_per_head: int) -> torch.Tensor:
        """[X, 1, G * queries, C] to add to scores."""
        mask = self.prefix_mask_XGC
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(queries_per_head, dim=1)
        return mask[:, None]

    def merged(self, parts: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Merge the outputs [items, Hq, D] and log-sum-exps [items, Hq] of the items of each row; return [B, Hq, D]."""
        scales = torch.cat((scales, scales.new_full((1, scales.shape[1]), float("-inf"))))
        weights_BMH = torch.softmax(scales.index_select(0, self.item).unflatten(0, self.shape), dim=1)
        parts_BMHD = parts.index_select(0, self.part).unflatten(0, self.shape)
        return (parts_BMHD * weights_BMH.unsqueeze(-1)).sum(dim=1).to(parts.dtype)


def attend_to_block(call: AttentionCall, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a part of the keys: return the output [X, Hkv, Q, D], and the log-sum-exp of the scores [X, Hkv, Q].

    Where the mask hides all keys, both are undefined.
    """
    is_half, is_even = call.query.dtype.itemsize == 2, call.key.shape[-1] == call.value.shape[-1]
    if call.query.device.type == "cpu" and is_half and call.softcap is None and is_even:
        # Has float32 scores; in float32, the products below are faster.
        return _flash_on_cpu(call.query, call.key, call.value, attn_mask=mask, scale=call.scaling)
    scores = soft_cap((call.query * call.scaling) @ call.key.transpose(2, 3), call.softcap) + mask
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.softmax(scores, dim=-1).to(call.value.dtype) @ call.value, torch.logsumexp(scores, dim=-1)


def _counted_up(counts: np.ndarray) -> np.ndarray:
    """Return 0 to n - 1 for each count n, one after the other."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)


def _ints(values: Iterable[int], count: int) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64, count=count)
