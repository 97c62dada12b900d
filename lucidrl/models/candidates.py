"""Log-probabilities of several candidates for each token, and of all other tokens together.

The head is evaluated in chunks of tokens, again in the backward pass, so there are logits of one chunk at a time. If
the vocabulary is split over ranks, each rank computes its shard, and ranks exchange K + 3 numbers per token.

Shapes: N tokens, D hidden size, V vocabulary, K candidates, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lucidrl.losses.interfaces import TokenOutputs
from lucidrl.models.head import LogitTransform, VocabShard, add_product, chunks_of, local_part
from lucidrl.profiling.spans import span
from lucidrl.profiling.worker_times import COMMUNICATION


def candidate_logprobs(
    hidden: torch.Tensor,
    head: nn.Linear,
    targets: torch.Tensor,
    ids: torch.Tensor,
    transform: LogitTransform,
    *,
    group: dist.ProcessGroup | None = None,
) -> TokenOutputs:
    """Return log-probabilities [N] of `targets` and `candidates` [N, K + 1] from hidden states [N, D]; differentiable.

    Args:
        ids: [N, K] int64, different ids per token.
        group: ranks that split the head's vocabulary, as for `token_logprobs`.
    """
    weight: torch.Tensor = head.weight
    bias: torch.Tensor | None = head.bias
    shard = None
    if group is not None:
        weight, bias = local_part(weight), None if bias is None else local_part(bias)
        shard = VocabShard.of_head(head, group)
    logprobs, candidates = _CandidateLogprobs.apply(hidden, weight, bias, targets, ids, transform, shard)
    return TokenOutputs(logprobs=logprobs, candidates=candidates)


@torch.no_grad()
def top_logprobs(
    hidden: torch.Tensor, head: nn.Linear, top_k: int, num_ids: int, transform: LogitTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` likeliest of the first `num_ids` tokens [N, K], and their `candidates` [N, K + 1]."""
    ids = torch.empty(len(hidden), top_k, dtype=torch.int64, device=hidden.device)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    candidates = torch.empty(len(hidden), top_k + 1, dtype=dtype, device=hidden.device)
    for chunk in chunks_of(len(hidden), head.weight.shape[0]):
        logits = transform(head(hidden[chunk]))
        top, ids[chunk] = logits[:, :num_ids].topk(top_k)
        rest = logits.scatter(1, ids[chunk], -torch.inf).logsumexp(dim=1, keepdim=True)
        candidates[chunk] = torch.cat([top, rest], dim=1) - logits.logsumexp(dim=1, keepdim=True)
    return ids, candidates


class _CandidateLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        ids: torch.Tensor,
        transform: LogitTransform,
        shard: VocabShard | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = torch.cat([ids, targets[:, None]], dim=1)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = torch.empty(len(hidden), wanted.shape[1] + 2, dtype=dtype, device=hidden.device)
        for chunk in chunks_of(len(hidden), len(weight)):
            logits = transform(F.linear(hidden[chunk], weight, bias))
            index, owned = _in_shard(wanted[chunk], shard)
            picked = logits.gather(1, index)
            values[chunk, :-2] = picked if owned is None else picked.masked_fill(~owned, 0)
            values[chunk, -2] = _others(logits, index[:, :-1], owned).logsumexp(dim=1)
            values[chunk, -1] = logits.logsumexp(dim=1)
        if shard is not None:
            parts = [torch.empty_like(values) for _ in range(shard.group.size())]
            with span(COMMUNICATION):
                dist.all_gather(parts, values, group=shard.group)
            values_RN = torch.stack(parts)
            values = torch.cat([values_RN[..., :-2].sum(0), values_RN[..., -2:].logsumexp(0)], dim=1)
        *_, others, normalizer = values.unbind(dim=1)
        ctx.save_for_backward(hidden, weight, bias, wanted, others, normalizer)
        ctx.transform, ctx.shard = transform, shard
        logprobs = values[:, :-1] - normalizer[:, None]
        candidates = torch.cat([logprobs[:, :-2], logprobs[:, -1:]], dim=1)
        return logprobs[:, -2].contiguous(), candidates

    @staticmethod
    def backward(ctx: Any, grad_target: torch.Tensor, grad_candidates: torch.Tensor) -> tuple[Any, ...]:
        """With p the probability, and q the probability given that the token is no candidate,
        d logprob / d logit = onehot - p, and d others / d logit = q - p."""
        hidden, weight, bias, wanted, others, normalizer = ctx.saved_tensors
        transform, shard = ctx.transform, ctx.shard
        grad_wanted = torch.cat([grad_candidates[:, :-1], grad_target[:, None]], dim=1)
        grad_others = grad_candidates[:, -1:]
        grad_total = grad_wanted.sum(dim=1, keepdim=True) + grad_others
        others = others.clamp(min=torch.finfo(others.dtype).min)[:, None]  # -inf if all tokens are candidates
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        accurate = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=accurate) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=accurate) if bias is not None and ctx.needs_input_grad[2] else None
        for chunk in chunks_of(len(hidden), len(weight)):
            raw = F.linear(hidden[chunk], weight, bias)
            logits = transform(raw)
            index, owned = _in_shard(wanted[chunk], shard)
            grad = torch.exp(logits - normalizer[chunk, None]).mul_(-grad_total[chunk])
            grad += torch.exp(_others(logits, index[:, :-1], owned) - others[chunk]).mul_(grad_others[chunk])
            ours = grad_wanted[chunk] if owned is None else grad_wanted[chunk] * owned
            grad.scatter_add_(1, index, ours.to(grad.dtype))
            grad = transform.chain(grad, raw).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad, hidden[chunk])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=accurate)
        if shard is not None and grad_hidden is not None:
            with span(COMMUNICATION):
                dist.all_reduce(grad_hidden, group=shard.group)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *(None,) * 4,
        )


def _in_shard(wanted: torch.Tensor, shard: VocabShard | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the index of each id in this rank's logits, and which ids this rank owns; None if it owns all."""
    return (wanted, None) if shard is None else (shard.index(wanted), shard.owns(wanted))


def _others(logits: torch.Tensor, index: torch.Tensor, owned: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of the logits, -inf for the candidates."""
    if owned is None:
        return logits.scatter(1, index, -torch.inf)
    # Ids of other shards share an index with an id of this one.
    masks = torch.where(owned[:, :-1], -torch.inf, torch.inf).to(logits.dtype)
    return logits.scatter_reduce(1, index, masks, "amin")
