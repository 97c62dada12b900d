"""The attention function of all models, and the token layouts that it supports.

transformers looks up an attention function by name and passes the keyword arguments of `forward` to it. This module
registers the function `lucidrl`, which receives a *layout*. A layout knows how the tokens of a call are stored
(right-padded rows, a packed stream, a prefix tree, prompts to be cached, one new token per row) and computes their
causal attention.

Shapes: B rows, R rows of a packed stream, T tokens, S packed tokens, Hq/Hkv query/key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from lucidrl.distributed.packing import PackedRows
from lucidrl.distributed.prefix_tree import PrefixTree, Segment
from lucidrl.errors import ConfigError

NAME = "lucidrl"
QUERIES_PER_CALL = 512
"""Queries that attend to a shared prefix in one call; limits the size of masks."""
MOST_FLOAT32_KEYS = 256
"""On CPUs, half-precision attention to at most this many keys is computed in float32: the backward pass of torch's
half-precision kernel takes two to five times as long there."""


@dataclass(frozen=True)
class AttentionCall:
    """Query, key and value of one layer, and the layer's attention parameters."""

    query: torch.Tensor
    """[B, Hq, T, D]"""
    key: torch.Tensor
    """[B, Hkv, T, D]"""
    value: torch.Tensor
    """[B, Hkv, T, Dv]; Dv is D except in architectures with narrower value heads."""
    layer: int
    scaling: float
    dropout: float
    window: int | None
    """Number of positions that a token attends to in a sliding-window layer, including its own."""
    softcap: float | None


class AttentionLayout(Protocol):
    """How the tokens of a forward call are stored."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output [B, T, Hq, Dv]."""
        ...


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: AttentionLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if layout is None:
        raise ConfigError("its code does not pass the keyword arguments of `forward` on to the attention function")
    if attention_mask is not None:
        raise ConfigError("its code creates an attention mask")
    call = AttentionCall(
        query,
        key,
        value,
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        window=sliding_window,
        softcap=softcap,
    )
    return layout.attend(call), None


AttentionInterface.register(NAME, _attention)


class PaddedLayout:
    """Right-padded rows. They need no padding mask: padding comes after all tokens, and attention is causal."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return causal_attention(call).transpose(1, 2)


class PackedLayout:
    """Rows packed into one stream [1, S]; attention unpacks them to padded rows, other layers process the stream."""

    def __init__(self, rows: PackedRows):
        self.rows = rows

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.repacked(causal_attention(self.padded(call)))

    def padded(self, call: AttentionCall) -> AttentionCall:
        """Return the call with query, key and value unpacked to zero-padded rows [R, H, T, D]."""
        query, key, value = (
            self.rows.unpack(stream[0].transpose(0, 1)).transpose(1, 2) for stream in (call.query, call.key, call.value)
        )
        return replace(call, query=query, key=key, value=value)

    def repacked(self, output: torch.Tensor) -> torch.Tensor:
        """[R, H, T, D] → [1, S, H, D]"""
        return self.rows.pack(output.transpose(1, 2)).unsqueeze(0)


class TreeLayout:
    """The stream of a prefix tree [1, S]. A token attends to its segment and to the segments above, causally."""

    def __init__(self, tree: PrefixTree):
        self.tree = tree

    def attend(self, call: AttentionCall) -> torch.Tensor:
        sizes = [batch.packed.input_ids.shape[1] for batch in self.tree.batches]
        streams = [stream[0].transpose(0, 1).split(sizes) for stream in (call.query, call.key, call.value)]
        paths: dict[Segment, tuple[torch.Tensor, torch.Tensor]] = {}
        outputs = []
        for batch, *parts in zip(self.tree.batches, *streams, strict=True):
            query, key, value = (batch.packed.unpack(part) for part in parts)
            if parents := batch.parents:
                keys_above, values_above = zip(*(paths[parent] for parent in parents), strict=True)
                key, value = _with_prefixes(keys_above, key), _with_prefixes(values_above, value)
            rows = replace(call, query=query.transpose(1, 2), key=key.transpose(1, 2), value=value.transpose(1, 2))
            outputs.append(batch.packed.pack(_attend_after(rows, batch.start).transpose(1, 2)))
            if any(segment.children for segment in batch.segments):
                for segment, *whole in zip(batch.segments, key.unbind(), value.unbind(), strict=True):
                    if segment.children:
                        paths[segment] = whole[0][: segment.end], whole[1][: segment.end]
        return torch.cat(outputs).unsqueeze(0)


def _with_prefixes(prefixes: Sequence[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
    """Put the prefix of each parent, [prefix, H, D], before its children in `own`, [parents * children, T, H, D]."""
    own_families = own.unflatten(0, (len(prefixes), -1))
    repeated = torch.stack(tuple(prefixes)).unsqueeze(1).expand(-1, own_families.shape[1], -1, -1, -1)
    return torch.cat((repeated, own_families), dim=2).flatten(0, 1)


def _attend_after(call: AttentionCall, start: int) -> torch.Tensor:
    """Compute causal attention of queries at positions `start` and later to keys from position 0."""
    if start == 0:
        return causal_attention(call)
    outputs = []
    for first in range(0, call.query.shape[2], QUERIES_PER_CALL):
        query = call.query[:, :, first : first + QUERIES_PER_CALL]
        end = start + first + query.shape[2]
        outputs.append(
            attend_from_end(replace(call, query=query, key=call.key[:, :, :end], value=call.value[:, :, :end]))
        )
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def causal_attention(call: AttentionCall) -> torch.Tensor:
    """Compute causal attention over rows [B, H, T, D] that start at position 0."""
    length = call.query.shape[2]
    windowed = call.window is not None and call.window < length
    if call.softcap is not None:
        return capped_attention(call)
    mask = causal_mask(length, length, call.window, call.query.device) if windowed else None
    return _fused_attention(call, attn_mask=mask, is_causal=mask is None)


def _fused_attention(call: AttentionCall, **masking: Any) -> torch.Tensor:
    """Call torch's fused attention."""
    query, key, value = call.query, call.key, call.value
    dtype = query.dtype
    if query.device.type == "cpu" and dtype.itemsize == 2 and key.shape[2] <= MOST_FLOAT32_KEYS:
        query, key, value = query.float(), key.float(), value.float()
    is_grouped = query.shape[1] != key.shape[1]
    options = {"dropout_p": call.dropout, "scale": call.scaling, "enable_gqa": is_grouped, **masking}
    return F.scaled_dot_product_attention(query, key, value, **options).to(dtype)


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return [queries, keys], True where a query attends to a key. Queries are the last positions of the keys."""
    position = torch.arange(num_keys, device=device)
    distance = position[num_keys - num_queries :, None] - position
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def soft_cap(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Limit scores smoothly to (-cap, cap)."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def repeated_heads(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value with one head per query head."""
    groups = call.query.shape[1] // call.key.shape[1]
    return call.key.repeat_interleave(groups, dim=1), call.value.repeat_interleave(groups, dim=1)


def capped_attention(call: AttentionCall) -> torch.Tensor:
    """Compute causal attention with soft-capped scores, which fused kernels do not support.

    Queries are at the last positions of the keys.
    """
    key, value = repeated_heads(call)
    scores = soft_cap(call.query @ key.transpose(2, 3) * call.scaling, call.softcap)
    visible = causal_mask(scores.shape[-2], scores.shape[-1], call.window, scores.device)
    accurate = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1, dtype=accurate)
    return F.dropout(weights, call.dropout).to(value.dtype) @ value


def attend_from_end(call: AttentionCall) -> torch.Tensor:
    """Compute causal attention of queries that are at the last positions of the keys."""
    num_queries = call.query.shape[2]
    if call.window is not None:  # no query reaches earlier keys
        reached = slice(max(0, call.key.shape[2] - num_queries - call.window + 1), None)
        call = replace(call, key=call.key[:, :, reached], value=call.value[:, :, reached])
    num_keys = call.key.shape[2]
    if call.softcap is not None:
        return capped_attention(call)
    if call.window is not None and call.window < num_keys:
        # No fused kernel takes both a mask and grouped heads on CUDA.
        mask = causal_mask(num_queries, num_keys, call.window, call.query.device)
        key, value = repeated_heads(call)
        return _fused_attention(replace(call, key=key, value=value), attn_mask=mask)
    # CUDA kernels support this mask without a tensor.
    return _fused_attention(call, attn_mask=causal_lower_right(num_queries, num_keys))
