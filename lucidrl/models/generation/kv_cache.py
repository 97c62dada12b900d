"""Keys and values of a batch being decoded: each prompt's once, each completion's own.

The completions of one prompt read the same cached prompt: their queries are laid side by side into one matrix product.
All rows advance together, so the i-th new token of every row is in column i of the suffix, whatever its prompt's
length; positions are carried by the rotary embedding of the keys, not by where they are stored.

Shapes: P prompts, G most rows of one prompt, B rows, T padded prompt length, N new tokens, Hq/Hkv heads, D head size.
"""

from __future__ import annotations

import torch

from lucidrl.distributed.packing import PackedRows
from lucidrl.models.attention import AttentionCall, PackedLayout, causal_attention, soft_cap

GROWTH = 16
"""New tokens that get room at a time. Matrix products run over the whole buffers, which are faster than slices of them,
so the room that is not filled yet has to stay small."""


class PrefillLayout(PackedLayout):
    """A packed batch of prompts whose keys and values are kept for decoding."""

    def __init__(self, rows: PackedRows, cache: KVCache):
        super().__init__(rows)
        self.cache = cache

    def attend(self, call: AttentionCall) -> torch.Tensor:
        padded = self.padded(call)
        self.cache.prompt_keys[call.layer] = padded.key.contiguous()
        self.cache.prompt_values[call.layer] = padded.value.contiguous()
        return self.repacked(causal_attention(padded))


class KVCache:
    """The cache, and the layout of a decoding step: one new token a row."""

    def __init__(self, prompt_lengths_P: torch.Tensor, prompt_of_row_B: torch.Tensor, max_new_tokens: int):
        self.prompt_keys: dict[int, torch.Tensor] = {}
        """[P, Hkv, T, D] of each layer."""
        self.prompt_values: dict[int, torch.Tensor] = {}
        self._keys: dict[int, torch.Tensor] = {}
        """[B, Hkv, C, D] of each layer, C new tokens having room; 0 where nothing was written yet."""
        self._values: dict[int, torch.Tensor] = {}
        self._prompt_lengths_P = prompt_lengths_P
        self._max_new_tokens = max_new_tokens
        self._hiding: dict[int | None, torch.Tensor] = {}
        """What hides positions in this step, for each window."""
        self.num_new = 0
        """Tokens of each completion that are cached so far."""
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
        scores += self._hidden_positions(call.window, prompt_keys.shape[2], keys.shape[2], scores.dtype)
        weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
        prompt_weights, own_weights = weights.split((prompt_keys.shape[2], keys.shape[2]), dim=-1)
        from_prompt = self._to_rows(prompt_weights @ prompt_values, query.shape[2])
        from_own = self._to_rows(own_weights, query.shape[2]) @ values
        return (from_prompt + from_own).reshape(rows, 1, query_heads, call.value.shape[-1])

    def step_done(self) -> None:
        """All layers have stored the newest token."""
        self.num_new += 1
        self._hiding.clear()

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows but these, and the prompts that no row needs any more."""
        prompts, prompt_of_row = torch.unique(self._prompt_of_row_B[rows], return_inverse=True)
        # One layer at a time: no more than one layer's cache exists twice.
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
        """Lay the rows out as a grid [P, G] of (prompt, slot); rows of a prompt need not be adjacent."""
        self._prompt_of_row_B = prompt_of_row_B
        self._hiding.clear()
        counts_P = torch.bincount(prompt_of_row_B, minlength=len(self._prompt_lengths_P))
        self._grid_shape = (len(counts_P), int(counts_P.max()))
        order = torch.argsort(prompt_of_row_B, stable=True)
        starts_P = counts_P.cumsum(0) - counts_P
        slot_of_row = torch.empty_like(order)
        slot_of_row[order] = torch.arange(len(order), device=order.device) - starts_P[prompt_of_row_B[order]]
        self._place_of_row_B = prompt_of_row_B * self._grid_shape[1] + slot_of_row
        # Empty places of the grid hold a copy of row 0; nothing reads their results.
        self._row_at_place = torch.zeros(
            self._grid_shape[0] * self._grid_shape[1], dtype=torch.int64, device=order.device
        )
        self._row_at_place[self._place_of_row_B] = torch.arange(len(order), device=order.device)
        in_order = torch.arange(len(self._row_at_place), device=order.device)
        self._is_identity = torch.equal(self._place_of_row_B, in_order)

    def _to_grid(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, Q, X] → [P, Hkv, G * Q, X]"""
        if not self._is_identity:
            rows = rows.index_select(0, self._row_at_place)
        grid = rows.unflatten(0, self._grid_shape).transpose(1, 2)
        return grid.flatten(2, 3)

    def _to_rows(self, grid: torch.Tensor, queries: int) -> torch.Tensor:
        """[P, Hkv, G * Q, X] → [B, Hkv, Q, X]"""
        places = grid.unflatten(2, (self._grid_shape[1], queries)).transpose(1, 2).flatten(0, 1)
        return places if self._is_identity else places.index_select(0, self._place_of_row_B)

    def _append(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the newest token's key and value; returns all [B, Hkv, C, D]."""
        for own, new in ((self._keys, call.key), (self._values, call.value)):
            if call.layer not in own:
                own[call.layer] = self._room_for(new)
            elif own[call.layer].shape[2] == self.num_new:
                own[call.layer] = torch.cat((own[call.layer], self._room_for(new)), dim=2)
            own[call.layer][:, :, self.num_new] = new[:, :, 0]
        return self._keys[call.layer], self._values[call.layer]

    def _room_for(self, new: torch.Tensor) -> torch.Tensor:
        rows, heads, _, size = new.shape
        # Zeros, not just memory: their weight is 0, and 0 times whatever lay there might be NaN.
        return new.new_zeros(rows, heads, min(GROWTH, self._max_new_tokens - self.num_new), size)

    def _hidden_positions(
        self, window: int | None, prompt_length: int, capacity: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[P, 1, 1, T + C] to add to scores: -inf on padding, on room not filled yet and outside the window."""
        if window not in self._hiding:
            lengths = self._prompt_lengths_P[:, None]
            in_prompt = torch.arange(prompt_length, device=lengths.device).expand(len(lengths), -1)
            new = torch.arange(capacity, device=lengths.device).expand(len(lengths), -1)
            hidden = torch.cat((in_prompt >= lengths, new > self.num_new), dim=1)
            if window is not None:
                position = torch.cat((in_prompt, lengths + new), dim=1)
                hidden |= lengths + self.num_new - position >= window
            hiding = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._hiding[window] = hiding[:, None, None, :]
        return self._hiding[window]
