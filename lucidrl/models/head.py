"""Log-probabilities and entropy of tokens from hidden states, without float32 logits of all tokens in memory.

The head is evaluated in chunks of tokens. Scoring keeps the logits of one chunk at a time. Training keeps two bytes per
raw logit for the backward pass: all chunks in half precision, every second chunk in float32. The backward pass
evaluates the head again for the other chunks; with `recompute`, for all chunks.

If the vocabulary is split over ranks, each rank scores its shard of the vocabulary. Ranks exchange three numbers per
token, in one collective, to combine the shards into one distribution.

Shapes: N tokens, D hidden size, V vocabulary, C tokens of a chunk, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from lucidrl.losses.interfaces import TokenOutputs
from lucidrl.profiling.spans import span
from lucidrl.profiling.worker_times import COMMUNICATION

CHUNK_ELEMENTS = 1 << 23
"""Logits per chunk: small enough for the CPU caches, large enough for efficient matrix products."""

CHUNKS_PER_SUM = 3
"""Chunks per matrix product of gradients. More chunks add to the weight's gradient less often, and take more memory."""

ROWS_PER_PRODUCT = 8192
"""In half precision, rows of the weight's gradient that are added at a time."""


@dataclass(frozen=True)
class LogitTransform:
    """The model's scaling and soft cap of raw logits, then division by the temperature, before the softmax."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def is_identity(self) -> bool:
        return (self.scale, self.softcap, self.temperature) == (1.0, None, 1.0)

    def __call__(self, raw: torch.Tensor) -> torch.Tensor:
        """Return logits in at least float32, differentiable in `raw`; `raw` itself if nothing changes."""
        accurate = torch.promote_types(raw.dtype, torch.float32)
        if raw.dtype == accurate and self.is_identity:
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
        """Convert the gradient of transformed logits, in place, to the gradient of raw logits."""
        if self.softcap is not None:
            grad.mul_(1 - torch.tanh(raw.to(grad.dtype) * (self.scale / self.softcap)).square_())
        factor = self.scale / self.temperature
        return grad.mul_(factor) if factor != 1.0 else grad


def token_logprobs(
    hidden: torch.Tensor,
    head: nn.Linear,
    targets: torch.Tensor,
    transform: LogitTransform,
    *,
    with_entropy: bool = False,
    recompute: bool = False,
    group: dist.ProcessGroup | None = None,
) -> TokenOutputs:
    """Return log-probabilities [N] of `targets` and entropies [N], given hidden states [N, D]; differentiable.

    Args:
        recompute: keep no logits for the backward pass.
        group: ranks that split the head's vocabulary. The head's parameters are DTensors sharded along dim 0, or this
            rank's shards. All ranks must pass the same hidden states, targets and gradients; results are equal on all.
    """
    keep_logits = torch.is_grad_enabled() and not recompute
    weight: torch.Tensor = head.weight
    bias: torch.Tensor | None = head.bias
    shard = None
    if group is not None:
        weight, bias = local_part(weight), None if bias is None else local_part(bias)
        shard = VocabShard.of_head(head, group)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, transform, with_entropy, keep_logits, shard)
    return TokenOutputs(logprobs=logprobs, entropy=entropy if with_entropy else None)


def gathered_logits(hidden: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    """Return raw logits [N, V] of hidden states [N, D] on every rank, for a head split over ranks; differentiable."""
    weight = head.weight
    assert isinstance(weight, DTensor)
    replicated = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    logits = F.linear(replicated, weight, head.bias)
    assert isinstance(logits, DTensor)
    return logits.full_tensor()


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter. It is differentiable; the parameter's gradient is a DTensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def chunks_of(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(16, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


@dataclass(frozen=True)
class VocabShard:
    """The token ids whose logits this rank computes."""

    group: dist.ProcessGroup
    """Ranks that split the vocabulary; all score the same hidden states."""
    first: int
    size: int

    @classmethod
    def of_head(cls, head: nn.Linear, group: dist.ProcessGroup) -> VocabShard:
        """Return this rank's shard of a head that DTensor splits along dim 0."""
        per_rank = -(-head.out_features // group.size())
        first = per_rank * group.rank()
        size = min(per_rank, head.out_features - first)
        assert size > 0, "every rank has a shard of the vocabulary"
        return cls(group, first, size)

    def owns(self, targets: torch.Tensor) -> torch.Tensor:
        return (targets >= self.first) & (targets < self.first + self.size)

    def index(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the index of each target in this shard; targets of other shards get an arbitrary valid index."""
        return (targets - self.first).clamp_(0, self.size - 1)

    def combine(
        self, normalizer: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return normalizer, log-probabilities and entropy over the whole vocabulary, each [N].

        Results are bit-identical on all ranks.
        """
        owned_logprobs = torch.where(self.owns(targets), logprobs, -torch.inf)
        part = torch.stack([normalizer, owned_logprobs, entropy])
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        with span(COMMUNICATION):
            dist.all_gather(parts, part, group=self.group)
        normalizer_RN, logprobs_RN, entropy_RN = torch.stack(parts, dim=1)
        total = torch.logsumexp(normalizer_RN, dim=0)
        log_share_RN = normalizer_RN - total
        # Entropy of a choice in two stages: first the shard, then the token within the shard.
        entropy = (log_share_RN.exp() * (entropy_RN - log_share_RN)).sum(0)
        return total, (logprobs_RN + log_share_RN).amax(0), entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
        with_entropy: bool,
        keep_logits: bool,
        shard: VocabShard | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        accurate = torch.promote_types(hidden.dtype, torch.float32)
        normalizer, logprobs, entropy = (hidden.new_zeros(hidden.shape[0], dtype=accurate) for _ in range(3))
        index = targets if shard is None else shard.index(targets)
        kept: list[torch.Tensor | None] = []
        for number, chunk in enumerate(chunks_of(hidden.shape[0], weight.shape[0])):
            raw = F.linear(hidden[chunk], weight, bias)
            logits = transform(raw)
            chosen = logits.gather(1, index[chunk, None])[:, 0]
            log_p = torch.log_softmax(logits, dim=-1)
            logprobs[chunk] = log_p.gather(1, index[chunk, None])[:, 0]
            normalizer[chunk] = chosen - logprobs[chunk]
            if with_entropy:
                entropy[chunk] = -torch.exp(log_p).mul_(log_p).sum(-1)
            kept.append(raw if keep_logits and number % (raw.itemsize // 2) == 0 else None)
        if shard is not None:
            normalizer, logprobs, entropy = shard.combine(normalizer, logprobs, entropy, targets)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy, *kept)
        ctx.transform, ctx.with_entropy, ctx.shard = transform, with_entropy, shard
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, normalizer, entropy, *kept = ctx.saved_tensors
        transform: LogitTransform = ctx.transform
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Accumulate in float32: many bfloat16 additions would lose small values.
        accurate = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=accurate) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=accurate) if bias is not None and ctx.needs_input_grad[2] else None
        shard: VocabShard | None = ctx.shard
        target_index = targets if shard is None else shard.index(targets)
        grad_target = grad_logprobs if shard is None else grad_logprobs * shard.owns(targets)
        chunks = chunks_of(hidden.shape[0], weight.shape[0])
        # A softmax of raw logits is the cheapest gradient; the rows' factors are applied later.
        of_softmax = transform.is_identity and bias is None and shard is None and not ctx.with_entropy
        for first in range(0, len(chunks), CHUNKS_PER_SUM):
            group = slice(chunks[first].start, chunks[min(first + CHUNKS_PER_SUM, len(chunks)) - 1].stop)
            grad = hidden.new_empty(group.stop - group.start, weight.shape[0])
            for chunk, raw in list(zip(chunks, kept, strict=True))[first : first + CHUNKS_PER_SUM]:
                raw = F.linear(hidden[chunk], weight, bias) if raw is None else raw
                place = grad[chunk.start - group.start : chunk.stop - group.start]
                if of_softmax:
                    _softmax_minus_target(raw, targets[chunk, None], normalizer[chunk, None], place)
                    continue
                logits = transform(raw)
                # Not into `raw`, which a second backward pass may need again.
                target = place if logits.dtype == place.dtype else logits
                log_p = torch.sub(logits, normalizer[chunk, None], out=target)
                column = chunk, None
                of_entropy = grad_entropy[column] if ctx.with_entropy else None
                grad_chunk = _grad_logits(log_p, grad_logprobs[column], of_entropy, entropy[column])
                grad_chunk.scatter_add_(1, target_index[column], grad_target[column].to(grad_chunk.dtype))
                place.copy_(transform.chain(grad_chunk, raw))
            # Gradients are `factor * grad`; where factors are 1, they are left out.
            factor = -grad_logprobs[group, None] if of_softmax else None
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[group])
                if factor is not None:
                    grad_hidden[group].mul_(factor)
            if grad_weight is not None:
                rows = hidden[group] if factor is None else (hidden[group] * factor).to(hidden.dtype)
                add_product(grad_weight, grad, rows)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=accurate)
        if shard is not None and grad_hidden is not None:
            with span(COMMUNICATION):
                dist.all_reduce(grad_hidden, group=shard.group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *(None,) * 5,
        )


def _softmax_minus_target(
    raw: torch.Tensor, targets: torch.Tensor, normalizer: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the softmax of raw logits [C, V], minus 1 at the targets [C, 1], to `out`.

    The target's entry comes from its log-probability: near a probability of 1, the difference would be rounding.
    """
    torch.softmax(raw, dim=-1, out=out)
    logprob = raw.gather(1, targets).to(normalizer.dtype) - normalizer
    out.scatter_(1, targets, torch.expm1(logprob).to(out.dtype))


def _grad_logits(
    log_p: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of logits [C, V], without the one-hot term of the targets; overwrite `log_p` [C, V].

    d logprob / d logit = onehot - p;   d entropy / d logit = -p (log p + entropy). Other arguments are [C, 1].
    """
    if grad_entropy is None:
        return log_p.exp_().mul_(-grad_logprobs)
    return torch.exp(log_p).mul_(log_p.add_(entropy).mul_(-grad_entropy).sub_(grad_logprobs))


def add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """total += gradᵀ · hidden"""
    if total.dtype == grad.dtype:
        total.addmm_(grad.T, hidden)
        return
    # Blocks of the vocabulary keep the product small. Each is converted first, because adding tensors of two dtypes is
    # several times slower.
    for rows, columns in zip(total.split(ROWS_PER_PRODUCT), grad.split(ROWS_PER_PRODUCT, dim=1), strict=True):
        rows.add_((columns.T @ hidden).to(total.dtype))
