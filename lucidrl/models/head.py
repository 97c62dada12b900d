"""From hidden states to log-probabilities and entropy of given tokens, without ever holding all logits in float32.

The head is evaluated in chunks of tokens. Scoring holds one chunk at a time. Training keeps raw logits for the backward
pass, two bytes for each: all chunks in half precision, every second one in float32, and evaluates the head again for
the others; with `recompute` it keeps none.

Shapes: N tokens, D hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CHUNK_ELEMENTS = 1 << 23
"""Logits in one chunk: small enough to stay near the caches, large enough for efficient matrix products."""

CHUNKS_PER_SUM = 4
"""In half precision, chunks whose gradients go into one matrix product: adding up products in float32 is expensive."""

ROWS_PER_PRODUCT = 8192
"""Rows of the weight's gradient that are added up at a time in half precision."""


@dataclass(frozen=True)
class LogitTransform:
    """What a model, and then the temperature, do to raw logits before the softmax."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        """Logits in at least float32, differentiable in `raw`; `raw` itself if there is nothing to do."""
        accurate = torch.promote_types(raw.dtype, torch.float32)
        if raw.dtype == accurate and (self.scale, self.softcap, self.temperature) == (1.0, None, 1.0):
            return raw
        logits = raw.to(accurate, copy=True)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits = torch.tanh(logits.div_(self.softcap)) * self.softcap
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        return logits

    def chain(self, grad: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of the transformed logits, in place, into that of the raw ones."""
        if self.softcap is not None:
            grad.mul_(1 - torch.tanh(raw.to(grad.dtype) * (self.scale / self.softcap)).square_())
        factor = self.scale / self.temperature
        return grad.mul_(factor) if factor != 1.0 else grad


@dataclass(frozen=True)
class HeadOutput:
    logprobs: torch.Tensor
    """[N] log-probability of each target."""
    entropy: torch.Tensor | None
    """[N] entropy of each distribution, if asked for."""


def token_logprobs(
    hidden: torch.Tensor,
    head: nn.Linear,
    targets: torch.Tensor,
    transform: LogitTransform,
    *,
    with_entropy: bool = False,
    recompute: bool = False,
) -> HeadOutput:
    """Log-probabilities of `targets` [N] after hidden states [N, D], differentiable in `hidden` and the head."""
    keep_logits = torch.is_grad_enabled() and not recompute
    logprobs, entropy = _TokenLogprobs.apply(
        hidden, head.weight, head.bias, targets, transform, with_entropy, keep_logits
    )
    return HeadOutput(logprobs, entropy if with_entropy else None)


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(16, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
        with_entropy: bool,
        keep_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        normalizer, logprobs, entropy = (hidden.new_zeros(hidden.shape[0], dtype=accurate) for _ in range(3))
        kept: list[torch.Tensor | None] = []
        for number, chunk in enumerate(_chunks(hidden.shape[0], weight.shape[0])):
            raw = F.linear(hidden[chunk], weight, bias)
            logits = transform(raw)
            chosen = logits.gather(1, targets[chunk, None])[:, 0]
            log_p = torch.log_softmax(logits, dim=-1)
            logprobs[chunk] = log_p.gather(1, targets[chunk, None])[:, 0]
            normalizer[chunk] = chosen - logprobs[chunk]
            if with_entropy:
                entropy[chunk] = -torch.exp(log_p).mul_(log_p).sum(-1)
            kept.append(raw if keep_logits and number % (raw.itemsize // 2) == 0 else None)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy, *kept)
        ctx.transform, ctx.with_entropy = transform, with_entropy
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, normalizer, entropy, *kept = ctx.saved_tensors
        transform: LogitTransform = ctx.transform
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Chunks add up in float32: many small bfloat16 additions would lose the small ones.
        accurate = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=accurate) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=accurate) if bias is not None and ctx.needs_input_grad[2] else None
        upstream = (grad_logprobs, grad_entropy if ctx.with_entropy else None)
        chunks = _chunks(hidden.shape[0], weight.shape[0])
        together = CHUNKS_PER_SUM if hidden.dtype != accurate else 1
        for first in range(0, len(chunks), together):
            group = slice(chunks[first].start, chunks[min(first + together, len(chunks)) - 1].stop)
            grad = hidden.new_empty(group.stop - group.start, weight.shape[0])
            for chunk, raw in list(zip(chunks, kept, strict=True))[first : first + together]:
                raw = F.linear(hidden[chunk], weight, bias) if raw is None else raw
                logits = transform(raw)
                # Raw logits may be asked for again, by a second backward pass.
                log_p = torch.sub(logits, normalizer[chunk, None], out=None if logits is raw else logits)
                grad_chunk = _grad_logits(log_p, targets, entropy, upstream, chunk)
                grad[chunk.start - group.start : chunk.stop - group.start] = transform.chain(grad_chunk, raw)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[group])
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[group])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=accurate)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *(None,) * 4,
        )


def _grad_logits(
    log_p: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    upstream: tuple[torch.Tensor, torch.Tensor | None],
    chunk: slice,
) -> torch.Tensor:
    """d logprob / d logit = onehot - p;   d entropy / d logit = -p (log p + entropy). Overwrites `log_p` [C, V].

    Args:
        upstream: [N] gradients of log-probabilities and, if it was asked for, of the entropy.
        chunk: the tokens that `log_p` belongs to.
    """
    grad_logprobs = upstream[0][chunk, None]
    if upstream[1] is None:
        grad = log_p.exp_().mul_(-grad_logprobs)
    else:
        grad_entropy = upstream[1][chunk, None]
        grad = torch.exp(log_p).mul_(log_p.add_(entropy[chunk, None]).mul_(-grad_entropy).sub_(grad_logprobs))
    return grad.scatter_add_(1, targets[chunk, None], grad_logprobs.to(grad.dtype))


def _add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """total += gradᵀ · hidden"""
    if total.dtype == grad.dtype:
        total.addmm_(grad.T, hidden)
        return
    # In blocks of the vocabulary, so that the product never exists whole; converted before it is added, because adding
    # tensors of two dtypes is several times slower.
    for rows, columns in zip(total.split(ROWS_PER_PRODUCT), grad.split(ROWS_PER_PRODUCT, dim=1), strict=True):
        rows.add_((columns.T @ hidden).to(total.dtype))
