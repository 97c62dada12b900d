"""Attention over the pages of the cache is causal attention; pages are shared, reused and moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lucidrl.models.attention import AttentionCall, causal_attention
from lucidrl.models.generation import decode_layout
from lucidrl.models.generation.decode_layout import DecodeLayout
from lucidrl.models.generation.kv_cache import CachedRow, Chunk, PrefillBatch
from lucidrl.models.generation.pages import FEWEST_PAGES, PagedTokens, PagePool

QUERY_HEADS, HEADS, SIZE = 4, 2, 6
PREFIX_LENGTHS = [5, 2, 7]
PREFIX_OF_ROW = [2, 0, 1, 2, 0, 2]
NEW = 12
CPU = torch.device("cpu")


def call_of(query, key, value, window=None, softcap=None) -> AttentionCall:
    return AttentionCall(query, key, value, 0, scaling=0.5, dropout=0.0, window=window, softcap=softcap)


def whole_rows(value_size: int = SIZE) -> list[tuple[torch.Tensor, ...]]:
    """Query, key and value [1, H, length, D] of each whole row; rows of a prefix begin with the same ones."""
    generator = torch.Generator().manual_seed(0)
    kinds = (QUERY_HEADS, SIZE), (HEADS, SIZE), (HEADS, value_size)

    def normal(length: int) -> list[torch.Tensor]:
        return [torch.randn(1, heads, length, size, generator=generator, dtype=torch.float64) for heads, size in kinds]

    prefixes = [normal(length) for length in PREFIX_LENGTHS]
    return [
        tuple(torch.cat(parts, dim=2) for parts in zip(prefixes[prefix], normal(NEW), strict=True))
        for prefix in PREFIX_OF_ROW
    ]


class Cache:
    """Rows whose attention is compared with that of whole rows."""

    def __init__(self, page_size: int, prefix_page_size: int, value_size: int = SIZE, **options):
        self.own_pool, self.prefix_pool = PagePool(page_size), PagePool(prefix_page_size)
        prefixes = [PagedTokens(self.prefix_pool) for _ in PREFIX_LENGTHS]
        self.rows = [CachedRow(prefixes[prefix], PagedTokens(self.own_pool)) for prefix in PREFIX_OF_ROW]
        self.options, self.whole = options, whole_rows(value_size)
        self.expected = [causal_attention(call_of(*row, **options)).transpose(1, 2)[0] for row in self.whole]
        self.layout: DecodeLayout | None = None
        self.num_layouts = 0

    def attend_and_compare(self, layout, places: list[tuple[int, slice]], is_packed: bool) -> None:
        parts = [[self.whole[row][part][:, :, place] for row, place in places] for part in range(3)]
        call = call_of(*(torch.cat(part, dim=2 if is_packed else 0) for part in parts), **self.options)
        output = layout.attend(call).flatten(0, 1)
        expected = torch.cat([self.expected[row][place] for row, place in places])
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)

    def prefill(self, numbers: list[int], first: int = 0, last: int | None = None) -> None:
        """Compute tokens of the prefixes of these rows."""
        chosen = [(number, slice(first, last or PREFIX_LENGTHS[PREFIX_OF_ROW[number]])) for number in numbers]
        chunks = [Chunk(np.zeros(place.stop - first, np.int64), self.rows[number].prefix) for number, place in chosen]
        self.attend_and_compare(PrefillBatch.of(chunks, CPU).layout, chosen, is_packed=True)

    def extend(self, counts: dict[int, int]) -> None:
        """Compute further tokens of rows, a number of tokens each, as in a later turn."""
        rows = [(self.rows[number], count) for number, count in counts.items()]
        places = [
            (number, slice(row.num_cached, row.num_cached + count))
            for number, (row, count) in zip(counts, rows, strict=True)
        ]
        chunks = [Chunk(np.zeros(count, np.int64), row.own, row.prefix) for row, count in rows]
        self.attend_and_compare(PrefillBatch.of(chunks, CPU).layout, places, is_packed=True)

    def decode(self, numbers: list[int]) -> None:
        """Compute the next token of each row."""
        rows = [self.rows[number] for number in numbers]
        places = [
            (number, slice(row.num_cached, row.num_cached + 1)) for number, row in zip(numbers, rows, strict=True)
        ]
        if self.layout is None or not self.layout.advance(rows):
            self.layout = DecodeLayout(rows, CPU)
            self.num_layouts += 1
        self.attend_and_compare(self.layout, places, is_packed=False)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize(("softcap", "value_size"), [(None, SIZE), (None, 4), (0.7, SIZE)])
@pytest.mark.parametrize(("page_size", "prefix_page_size"), [(1, 2), (4, 3), (64, 64)])
def test_decoding_with_pages_is_causal_attention(window, softcap, value_size, page_size, prefix_page_size):
    """Rows of different ages, in chunks and later turns; some rows (among them all of one prompt) finish early."""
    cache = Cache(page_size, prefix_page_size, value_size, window=window, softcap=softcap)
    cache.prefill([0, 1])
    cache.decode([0, 1, 3])
    cache.decode([0, 1, 3])
    cache.prefill([2])
    cache.decode([2, 0, 5, 3, 4])
    cache.rows[3].own.release()
    cache.extend({5: 4, 2: 2})
    cache.own_pool.defragment()
    for _ in range(4):
        cache.decode([0, 5, 2])
    cache.decode([0])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_a_prompt_may_be_computed_in_chunks(window, softcap):
    cache = Cache(4, 3, window=window, softcap=softcap)
    cache.prefill([0, 1], last=2)
    cache.prefill([0, 1], first=2, last=3)
    cache.prefill([1], first=3)
    cache.prefill([0], first=3)
    cache.decode([0, 1])
    cache.decode([0, 4, 1])


@pytest.mark.parametrize("window", [None, 3])
def test_a_layout_serves_the_next_steps_of_its_rows_while_their_pages_stay(window):
    cache = Cache(4, 3, window=window)
    cache.prefill([0, 1, 2])
    for _ in range(4):
        cache.decode([0, 1, 2])
    assert cache.num_layouts == 1
    cache.decode([0, 1, 2])  # needs new pages
    assert cache.num_layouts == 2
    cache.decode([2, 1, 0])  # has another order
    assert cache.num_layouts == 3
    cache.decode([2, 1])  # has fewer rows
    assert cache.num_layouts == 4
    cache.rows[0].own.release()
    cache.own_pool.defragment()  # moves pages of the others
    cache.decode([2, 1])
    assert cache.num_layouts == 5
    cache.decode([2, 1])  # needs new pages
    assert cache.num_layouts == 6
    cache.extend({2: 1})
    cache.decode([2, 1])  # one row has another token
    assert cache.num_layouts == 7


def test_more_columns_are_computed_as_pages_fill(monkeypatch):
    monkeypatch.setattr(decode_layout, "COLUMNS_PER_VECTOR", 2)
    cache = Cache(64, 64)
    cache.prefill([0, 1, 2])
    for _ in range(5):
        cache.decode([0, 1, 2])
    assert cache.num_layouts == 1


def test_half_precision_decoding_on_a_cpu_does_not_round_scores():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (4 * torch.randn(3, 1, 64, 40, 16, generator=generator)).to(torch.bfloat16)
    row = CachedRow(PagedTokens(PagePool(64)), PagedTokens(PagePool(64)))
    parts = slice(0, 39), slice(39, 40)
    first, last = (call_of(*(tensor[:, :, part] for tensor in (query, key, value))) for part in parts)
    PrefillBatch.of([Chunk(np.zeros(39, np.int64), row.prefix)], CPU).layout.attend(first)
    output = DecodeLayout([row], CPU).attend(last)[0, 0]
    expected = causal_attention(call_of(query.float(), key.float(), value.float()))[0, :, -1]
    # The weights of values are rounded, which changes outputs by 0.04; rounded scores change them by 0.57.
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=0.1)


def test_rows_of_a_prompt_share_its_pages():
    cache = Cache(4, 4)
    cache.prefill([0, 1, 2])
    cache.decode([*range(6)])
    assert (cache.prefix_pool.num_used, cache.own_pool.num_used) == (5, 6)


def sequences(pool: PagePool, lengths: list[int]) -> list[PagedTokens]:
    """Sequences whose keys are numbered by sequence and token."""
    made = [PagedTokens(pool) for _ in lengths]
    for number, (tokens, length) in enumerate(zip(made, lengths, strict=True)):
        keys = (100.0 * number + torch.arange(length)).view(-1, 1, 1)
        pool.write(0, pool.cells(tokens.extend(length), CPU), keys, -keys)
    return made


def content(tokens: PagedTokens) -> list[int]:
    keys, values = tokens.pool.read(0, tokens.pool.cells(tokens.places(), CPU))
    assert torch.equal(keys, -values)
    return keys.flatten().int().tolist()


def test_pools_grow_reuse_free_pages_and_move_pages_together():
    pool = PagePool(3)
    made = sequences(pool, [30, 4, 20, 1, 9])
    expected = [content(tokens) for tokens in made]
    assert expected[2] == [*range(200, 220)]
    assert (pool.num_used, pool.num_allocated) == (10 + 2 + 7 + 1 + 3, 2 * FEWEST_PAGES)
    made[0].release()
    made[3].release()
    assert (pool.num_used, pool.extent) == (12, 23)
    pool.defragment()
    assert pool.extent == 12
    assert [content(made[number]) for number in (1, 2, 4)] == [expected[number] for number in (1, 2, 4)]
    pool.resize(0)
    assert pool.num_allocated == 12
    again = sequences(pool, [5])[0]
    assert again.pages == [12, 13]
    assert [content(made[number]) for number in (1, 2, 4)] == [expected[number] for number in (1, 2, 4)]


def test_extending_by_one_is_extending():
    pool = PagePool(3)
    one, other = PagedTokens(pool), PagedTokens(PagePool(3))
    assert [one.extend_by_one() for _ in range(8)] == other.extend(8).tolist()
    assert one.pages == other.pages
