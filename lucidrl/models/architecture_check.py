"""Refuse architectures whose logits differ between our forward paths and their own code.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from lucidrl.distributed.packing import pack_rows
from lucidrl.errors import ConfigError
from lucidrl.models import attention
from lucidrl.models.generation.kv_cache import KVCache, PrefillLayout
from lucidrl.models.logprobs import LogprobModel

TOLERANCE = 3e-4
"""Largest difference of a token's logits, relative to their spread. Rounding in float32 causes about 1e-7, at most 3e-5
in 48 layers with large weights; unsupported architectures differ by 4e-4 or more, even with small weights."""
LENGTHS = (8, 5)
"""Lengths of the compared rows."""
KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layers that attend to all earlier tokens, or to a window of them."""


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse layers that mix tokens in ways that short rows may not reveal; needs no weights."""
    text: Any = model.config.get_text_config()
    if unknown := sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYER_TYPES):
        raise _unsupported(model, f"it has layers of type {', '.join(unknown)}")
    if model._is_stateful:
        raise _unsupported(model, "it carries a recurrent state")


@torch.no_grad()
def check_against_own_forward(model: PreTrainedModel) -> None:
    """Refuse a model whose logits on our paths differ from those of its reference code.

    Compares every token of padded rows, packed rows and decoding with a cache. Differences are relative to the spread
    of the logits and computed in at least float32, so that the scale and precision of the weights do not matter.

    Raises:
        ConfigError: names the path and its difference.
    """
    check_architecture(model)
    with _in_float32(model):
        try:
            differences = _differences(model)
        except ConfigError as error:
            raise _unsupported(model, str(error)) from error
        except Exception as error:  # third-party code may raise anything
            raise _unsupported(model, f"its code fails on our path ({type(error).__name__}: {error})") from error
    path, worst = max(differences.items(), key=lambda item: item[1])
    if not worst <= TOLERANCE:
        raise _unsupported(
            model, f"its logits differ from those of our {path} path by {worst:.2g} of their spread at the worst token"
        )


def _differences(model: PreTrainedModel) -> dict[str, float]:
    """Root mean square difference over V at the worst token of each path, relative to the spread of the logits."""
    device = next(model.parameters()).device
    lengths_B = torch.tensor(LENGTHS, device=device)
    rows, width = len(LENGTHS), max(LENGTHS)
    ids_BT = torch.arange(1, rows * width + 1, device=device).view(rows, width)
    ids_BT %= model.config.get_text_config().vocab_size
    is_token_BT = torch.arange(width, device=device) < lengths_B[:, None]
    own_BTV = _centred(_own_logits(model, ids_BT))
    spread = own_BTV[is_token_BT].square().mean().sqrt()

    # Pack the prompts: a model that mixes tokens outside of attention then mixes rows.
    wrapped, prompt_lengths_B = LogprobModel(model, temperature=1.0), lengths_B - 1
    padded_BTV = wrapped(ids_BT, lengths_B, frozenset({"logits"})).logits
    packed = pack_rows(ids_BT, prompt_lengths_B)
    cache = KVCache(prompt_lengths_B, torch.arange(rows, device=device), max_new_tokens=1)
    prompts = wrapped.hidden_states(packed.input_ids, packed.position_ids, PrefillLayout(packed, cache))
    last_B1 = prompt_lengths_B[:, None]
    decoded = wrapped.hidden_states(ids_BT.gather(1, last_B1), last_B1, cache)

    own_last_BV = own_BTV[torch.arange(rows, device=device), prompt_lengths_B]

    def worst(logits: torch.Tensor, own: torch.Tensor) -> float:
        difference = (_centred(logits) - own).square().mean(dim=-1).sqrt().max()
        return float(difference / spread) if difference != 0 else 0.0

    return {
        "padded": worst(padded_BTV[is_token_BT], own_BTV[is_token_BT]),
        "packed": worst(wrapped.next_token_logits(prompts), packed.pack(own_BTV)),
        "decoding": worst(wrapped.next_token_logits(decoded), own_last_BV),
    }


def _centred(logits: torch.Tensor) -> torch.Tensor:
    """Logits minus their mean per token, which does not affect probabilities."""
    logits = logits.double()
    return logits - logits.mean(dim=-1, keepdim=True)


def _own_logits(model: PreTrainedModel, ids_BT: torch.Tensor) -> torch.Tensor:
    # Fused implementations ignore features such as soft caps and attention sinks.
    model.config._attn_implementation = "eager"
    try:
        return model(input_ids=ids_BT, use_cache=False).logits
    finally:
        model.config._attn_implementation = attention.NAME


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Inside, half-precision tensors of the model are float32; converting them back restores every bit."""
    halves = [
        (tensor, tensor.dtype)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.dtype in (torch.bfloat16, torch.float16)
    ]
    try:
        for tensor, _ in halves:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in halves:
            tensor.data = tensor.data.to(dtype)


def _unsupported(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} is not supported: {reason}; use a model with causal attention in every layer, such as "
        "Llama, Qwen3 or Gemma (docs/models.md)"
    )
