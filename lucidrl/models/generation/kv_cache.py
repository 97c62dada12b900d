"""Key-value cache for decoding: one entry per prompt, and one per completion.

Completions of the same prompt share the cached keys and values of the prompt; one matrix product serves the queries of
all of them. Column i of a completion's cache holds its i-th new token for any prompt length: the position of a key is
in its rotary embedding, not in its column.

Shapes: P prompts, G maximum rows per prompt, B rows, T padded prompt length, N new tokens, Hq/Hkv heads, D head size.
"""

from __future__ import annotations

import torch

from lucidrl.distributed.packing import PackedRows
from lucidrl.models.attention import AttentionCall, PackedLayout, causal_attention, soft_cap

GROWTH = 16
"""Columns allocated at a time. The number is small, because matrix products include unused columns: products over whole
buffers are faster than over slices."""


class PrefillLayout(PackedLayout):
    """A packed batch of prompts; stores their keys and values for decoding."""

    def __init__(self, rows: PackedRows, cache: KVCache):
        super().__init__(rows)
        self.cache = cache

    def attend(self, call: AttentionCall) -> torch.Tensor:
        padded = self.padded(call)
        self.cache.prompt_keys[call.layer] = padded.key.contiguous()
        self.cache.prompt_values[call.layer] = padded.value.contiguous()
        return self.repacked(causal_attention(padded))


class KVCache:
    """The cache, and the layout of a decoding step: one new token per row."""

    def __init__(self, prompt_lengths_P: torch.Tensor, prompt_of_row_B: torch.Tensor, max_new_tokens: int):
        self.prompt_keys: dict[int, torch.Tensor] = {}
        """[P, Hkv, T, D] by layer."""
        self.prompt_values: dict[int, torch.Tensor] = {}
        self._keys: dict[int, torch.Tensor] = {}
        """[B, Hkv, C, D] by layer, with C allocated columns; 0 where unused."""
        self._values: dict[int, torch.Tensor] = {}
        self._prompt_lengths_P = prompt_lengths_P
        self._max_new_tokens = max_new_tokens
        self._masks: dict[int | None, torch.Tensor] = {}
        """Additive masks of this step, by window."""
        self.num_new = 0
        """Cached tokens per completion."""
        self._regroup(prompt_of_row_B)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        rows, query_heads, _, size = call.query.shape
        heads = call.key.shape[1]
        keys, values = self._append(call)
        query = (call.query * call.scaling).reshape(rows, heads, query_heads // heads, size)

        prompt_keys, prompt_values = self.prompt_keys[call.layer], self.prompt_values[call.layer]
        prompt_scores = self._to_grid(query) @ prompt_keys.transpose(2, 3)
        own_scores = self._to_grid(query @ keys.transpose(2, 3))
        scores = soft_cap(torch.cat((prompt_scores, own_scores), dim=-1), call.softcap)
        scores += self._mask(call.window, prompt_keys.shape[2], keys.shape[2], scores.dtype)
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
        prompt_weights, own_weights = weights.split((prompt_keys.shape[2], keys.shape[2]), dim=-1)
        from_prompt = self._to_rows(prompt_weights @ prompt_values, query.shape[2])
        from_own = self._to_rows(own_weights, query.shape[2]) @ values
        return (from_prompt + from_own).reshape(rows, 1, query_heads, call.value.shape[-1])

    def step_done(self) -> None:
        """Count the newest token; call this after every layer has stored it."""
        self.num_new += 1
        self._masks.clear()

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Keep only the rows with these indices; drop prompts without rows."""
        prompts, prompt_of_row = torch.unique(self._prompt_of_row_B[rows], return_inverse=True)
        # One layer at a time, so that only one layer's cache exists twice.
        for own in (self._keys, self._values):
            for layer, tensor in own.items():
                own[layer] = tensor.index_select(0, rows)
        if len(prompts) < len(self._prompt_lengths_P):
            for shared in (self.prompt_keys, self.prompt_values):
                for layer, tensor in shared.items():
                    shared[layer] = tensor.index_select(0, prompts)
            self._prompt_lengths_P = self._prompt_lengths_P[prompts]
        self._regroup(prompt_of_row)

    def _regroup(self, prompt_of_row_B: torch.Tensor) -> None:
        """Arrange the rows, whatever their order, as a grid [P, G] of slots with one line per prompt."""
        self._prompt_of_row_B = prompt_of_row_B
        self._masks.clear()
        counts_P = torch.bincount(prompt_of_row_B, minlength=len(self._prompt_lengths_P))
        self._grid_shape = len(counts_P), int(counts_P.max())
        row_B = torch.arange(len(prompt_of_row_B), device=prompt_of_row_B.device)
        order = torch.argsort(prompt_of_row_B, stable=True)
        starts_P = counts_P.cumsum(0) - counts_P
        column_of_row_B = torch.empty_like(row_B)
        column_of_row_B[order] = row_B - starts_P[prompt_of_row_B[order]]
        self._slot_of_row_B = prompt_of_row_B * self._grid_shape[1] + column_of_row_B
        # Empty slots of the grid hold a copy of row 0, whose results are unused.
        self._row_of_slot = row_B.new_zeros(self._grid_shape[0] * self._grid_shape[1])
        self._row_of_slot[self._slot_of_row_B] = row_B
        self._is_identity = torch.equal(self._slot_of_row_B, torch.arange(len(self._row_of_slot), device=row_B.device))

    def _to_grid(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, Q, X] → [P, Hkv, G * Q, X]"""
        if not self._is_identity:
            rows = rows.index_select(0, self._row_of_slot)
        grid = rows.unflatten(0, self._grid_shape).transpose(1, 2)
        return grid.flatten(2, 3)

    def _to_rows(self, grid: torch.Tensor, queries: int) -> torch.Tensor:
        """[P, Hkv, G * Q, X] → [B, Hkv, Q, X]"""
        slots = grid.unflatten(2, (self._grid_shape[1], queries)).transpose(1, 2).flatten(0, 1)
        return slots if self._is_identity else slots.index_select(0, self._slot_of_row_B)

    def _append(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Store key and value of the newest token; return the keys and values of all new tokens [B, Hkv, C, D]."""
        for own, new in ((self._keys, call.key), (self._values, call.value)):
            if call.layer not in own:
                own[call.layer] = self._new_columns(new)
            elif own[call.layer].shape[2] == self.num_new:
                own[call.layer] = torch.cat((own[call.layer], self._new_columns(new)), dim=2)
            own[call.layer][:, :, self.num_new] = new[:, :, 0]
        return self._keys[call.layer], self._values[call.layer]

    def _new_columns(self, new: torch.Tensor) -> torch.Tensor:
        rows, heads, _, size = new.shape
        # Zeros, since 0 (their attention weight) times uninitialized memory may be NaN.
        return new.new_zeros(rows, heads, min(GROWTH, self._max_new_tokens - self.num_new), size)

    def _mask(self, window: int | None, prompt_length: int, capacity: int, dtype: torch.dtype) -> torch.Tensor:
        """[P, 1, 1, T + C] to add to scores: -inf on padding, unused columns and outside the window."""
        if window not in self._masks:
            lengths = self._prompt_lengths_P[:, None]
            in_prompt = torch.arange(prompt_length, device=lengths.device).expand(len(lengths), -1)
            new = torch.arange(capacity, device=lengths.device).expand(len(lengths), -1)
            hidden = torch.cat((in_prompt >= lengths, new > self.num_new), dim=1)
            if window is not None:
                position = torch.cat((in_prompt, lengths + new), dim=1)
                hidden |= lengths + self.num_new - position >= window
            mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None, :]
        return self._masks[window]
