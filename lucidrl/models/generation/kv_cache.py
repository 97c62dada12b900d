"""Key-value cache: the layouts that fill it with prompts. `decode_layout.py` has the layout of a decoding step.

A row consists of a prefix, whose keys and values rows with the same prompt share, and of tokens after it. Both are in
pages. The place of a key says nothing about its position: the position is in its rotary embedding.

Shapes: S packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lucidrl.distributed.packing import PackedRows, pack_rows
from lucidrl.models.attention import (
    AttentionCall,
    AttentionLayout,
    PackedLayout,
    attend_from_end,
    causal_attention,
)
from lucidrl.models.generation.pages import PagedTokens, PagePool


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
                torch.cat((*(part.to(last.dtype) for part in parts), last)).transpose(0, 1)[None]
                for *parts, last in zip(*earlier, own, strict=True)  # keys, then values
            )
            outputs.append(attend_from_end(replace(call, query=call.query[:, :, part], key=key, value=value)))
        return torch.cat(outputs, dim=2).transpose(1, 2)
