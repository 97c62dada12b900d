"""A head whose vocabulary is split over ranks: each computes the logits of its own tokens, and few numbers travel.

A rank scores its part of the vocabulary as if it were the whole. What makes the parts one distribution is each part's
share of the probability, so three numbers for each token are exchanged, once for all tokens.

Shapes: N tokens, D hidden size, V vocabulary, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary whose logits this rank computes."""

    group: dist.ProcessGroup
    """The ranks that hold the vocabulary together; all of them score the same hidden states."""
    first: int
    """The first token of this rank's part."""
    size: int

    @classmethod
    def of_head(cls, head: nn.Linear, group: dist.ProcessGroup) -> VocabShard:
        """The part that a head's weight, split as DTensor splits dim 0, holds on this rank."""
        per_rank = -(-head.out_features // group.size())
        first = per_rank * group.rank()
        size = min(per_rank, head.out_features - first)
        assert size > 0, "every rank holds a part of the vocabulary"
        return cls(group, first, size)

    def owns(self, targets: torch.Tensor) -> torch.Tensor:
        return (targets >= self.first) & (targets < self.first + self.size)

    def index(self, targets: torch.Tensor) -> torch.Tensor:
        """Where the targets are in this rank's part; some valid place for those that it does not own."""
        return (targets - self.first).clamp_(0, self.size - 1)

    def combined(
        self, normalizer: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalizer, log-probabilities and entropy of the whole vocabulary, from those of its parts, all [N].

        Every rank computes them from the same numbers in the same order, so they are equal to the last bit.
        """
        owned_logprobs = torch.where(self.owns(targets), logprobs, -torch.inf)
        part = torch.stack([normalizer, owned_logprobs, entropy])
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part, group=self.group)
        normalizer_RN, logprobs_RN, entropy_RN = torch.stack(parts, dim=1)
        total = torch.logsumexp(normalizer_RN, dim=0)
        log_share_RN = normalizer_RN - total
        # Entropy of a choice in two steps: which part, then which token of it.
        entropy = (log_share_RN.exp() * (entropy_RN - log_share_RN)).sum(0)
        return total, (logprobs_RN + log_share_RN).amax(0), entropy


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, differentiable: its gradient is a DTensor like the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gathered_logits(hidden: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    """[N, D] → raw logits [N, V] on every rank, of a head whose weight is a DTensor; differentiable in both."""
    weight = head.weight
    assert isinstance(weight, DTensor)
    replicated = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    logits = F.linear(replicated, weight, head.bias)
    assert isinstance(logits, DTensor)
    return logits.full_tensor()
