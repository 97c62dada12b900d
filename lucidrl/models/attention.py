"""The one attention function every model runs with, and the layouts of tokens it understands.

transformers looks an attention function up by name and hands the keyword arguments of `forward` through to it. Ours is
registered as `lucidrl` and receives a *layout*: an object that knows how the tokens of this call lie in memory
(right-padded rows, a packed stream, prompts being cached, one new token a row) and computes causal attention for it.
Masks never exist as [T, T] tensors, and no model is written a second time.

Shapes: B rows, T tokens, S packed tokens, Hq/Hkv query/key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from lucidrl.distributed.packing import PackedRows
from lucidrl.errors import ConfigError

NAME = "lucidrl"


@dataclass(frozen=True)
class AttentionCall:
    """One layer's query, key and value, as the model computed them, and the layer's own parameters."""

    query: torch.Tensor
    """[B, Hq, T, D]"""
    key: torch.Tensor
    """[B, Hkv, T, D]"""
    value: torch.Tensor
    """[B, Hkv, T, Dv]; Dv is D except in architectures with narrower values."""
    layer: int
    scaling: float
    dropout: float
    window: int | None
    """Number of latest positions a token sees in layers with sliding-window attention."""
    softcap: float | None


class AttentionLayout(Protocol):
    """How the tokens of a forward call lie in memory."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output [B, T, Hq, Dv]."""
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
        raise ConfigError("its code does not pass the arguments of its forward on to the attention function")
    if attention_mask is not None:
        raise ConfigError("its code makes an attention mask of its own")
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
    """Right-padded rows. A causal token never sees the padding behind it, so no mask is needed."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return causal_attention(call).transpose(1, 2)


class PackedLayout:
    """Rows one behind the other in a single stream [1, S]: only attention sees them as separate, padded rows."""

    def __init__(self, rows: PackedRows):
        self.rows = rows

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.repacked(causal_attention(self.padded(call)))

    def padded(self, call: AttentionCall) -> AttentionCall:
        """The same call over rows [R, H, T, D] with zeros behind each."""
        query, key, value = (
            self.rows.unpack(stream[0].transpose(0, 1)).transpose(1, 2) for stream in (call.query, call.key, call.value)
        )
        return replace(call, query=query, key=key, value=value)

    def repacked(self, output: torch.Tensor) -> torch.Tensor:
        """[R, H, T, D] → [1, S, H, D]"""
        return self.rows.pack(output.transpose(1, 2)).unsqueeze(0)


def causal_attention(call: AttentionCall) -> torch.Tensor:
    """Causal attention over rows [B, H, T, D], all starting at position 0."""
    length = call.query.shape[2]
    windowed = call.window is not None and call.window < length
    if call.softcap is not None:
        return capped_attention(call)
    mask = causal_mask(length, length, call.window, call.query.device) if windowed else None
    return F.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=mask is None,
        scale=call.scaling,
        enable_gqa=call.query.shape[1] != call.key.shape[1],
    )


def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[queries, keys], True where a query may see a key; the last query is at the position of the last key."""
    position = torch.arange(num_keys, device=device)
    distance = position[num_keys - num_queries :, None] - position
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def soft_cap(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Squash scores smoothly into (-cap, cap)."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def repeated_heads(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value with a head for each query head."""
    groups = call.query.shape[1] // call.key.shape[1]
    return call.key.repeat_interleave(groups, dim=1), call.value.repeat_interleave(groups, dim=1)


def capped_attention(call: AttentionCall) -> torch.Tensor:
    """Causal attention with a soft cap on its scores, which the fused kernels lack; queries are the last positions."""
    key, value = repeated_heads(call)
    scores = soft_cap(call.query @ key.transpose(2, 3) * call.scaling, call.softcap)
    visible = causal_mask(scores.shape[-2], scores.shape[-1], call.window, scores.device)
    accurate = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1, dtype=accurate)
    return F.dropout(weights, call.dropout).to(value.dtype) @ value
