"""The loss protocol between policy workers and loss functions.

Shapes: B rows, T tokens, V vocabulary, K candidates; N frames, each one step of one env in a control task. Position i
of a [B, T] log-probability tensor belongs to token i of `input_ids`; position 0 has no prediction and holds 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from lucidrl.errors import DataError
from lucidrl.losses.reductions import Metrics

Need = Literal["logprobs", "entropy", "values", "logits", "candidates"]


class LossType(StrEnum):
    """Whether a loss is normalised by the number of valid tokens or of valid sequences."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


@dataclass(frozen=True)
class TokenOutputs:
    """Model outputs of one micro-batch. Outputs that the loss's `needs` does not list are None."""

    logprobs: torch.Tensor | None = None
    """[B, T] log-probability of each token given the previous ones, at the policy's temperature."""
    entropy: torch.Tensor | None = None
    """[B, T] entropy of the distribution that each token was sampled from."""
    values: torch.Tensor | None = None
    """[B, T] scores of the row up to and including each token (models with the reward role)."""
    logits: torch.Tensor | None = None
    """[B, T, V] next-token logits: position i predicts token i + 1."""
    candidates: torch.Tensor | None = None
    """[B, T, K + 1] log-probabilities of the column `CANDIDATE_IDS`, each in place of token i; the last is that of all
    other tokens together."""
    candidate_ids: torch.Tensor | None = None
    """[B, T, K] ids of the likeliest tokens, if a teacher was asked for them."""


@runtime_checkable
class LossFunction(Protocol):
    """A differentiable loss.

    It returns one summand of the global loss: the sum over the micro-batch, divided by the global counts. So the global
    loss does not depend on micro-batch size, packing or the number of ranks. A loss whose `needs` is exactly {"logits"}
    receives the bare [B, T, V] tensor instead of `TokenOutputs`.
    """

    loss_type: LossType
    needs: frozenset[Need]

    def __call__(
        self,
        outputs: TokenOutputs | torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]: ...


CANDIDATE_IDS = "candidate_ids"
"""Column of losses that need `candidates`: [B, T, K], different token ids for every token that counts."""
PAIR_IDS = "pair_ids"
"""Optional column, [B]: neighbouring rows with equal ids are trained together, in one micro-batch on one rank."""
STALENESS = "staleness"
"""Column of asynchronous training: how many policy versions each sampled token is behind the policy."""
IMPORTANCE_MASK = "importance_mask"
"""Optional column, [B, T]: 0 for tokens that the importance correction excludes; see `lucidrl.losses.importance`."""


def sampled_token_mask(data: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask of the tokens that the policy sampled in valid rows, [B, T] bool.

    A token counts if its `token_mask` and its row's `sample_mask` are not 0. The token at position 0 never counts,
    because no position predicts it.
    """
    for name in ("token_mask", "sample_mask"):
        if name not in data:
            raise DataError(f"the batch has no column {name!r}; add this column to the batch")
    mask_BT = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    mask_BT[:, 0] = False
    return mask_BT


def valid_token_mask(data: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask of the tokens that count in the loss, [B, T] bool.

    These are the tokens of `sampled_token_mask`, except those that `IMPORTANCE_MASK` excludes.
    """
    mask_BT = sampled_token_mask(data)
    return mask_BT & data[IMPORTANCE_MASK].bool() if IMPORTANCE_MASK in data else mask_BT


def valid_row_mask(data: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask of the rows that count in the loss, [B] bool.

    These are the rows with a `sample_mask` other than 0, except rows of which `IMPORTANCE_MASK` excludes every token.
    """
    mask_B = data["sample_mask"].bool()
    if IMPORTANCE_MASK not in data:
        return mask_B
    is_emptied_B = sampled_token_mask(data).any(dim=1) & ~valid_token_mask(data).any(dim=1)
    return mask_B & ~is_emptied_B


@dataclass(frozen=True)
class Frames:
    """Frames (env steps) to train on, in any order."""

    observations: torch.Tensor
    """[N, ...]"""
    latent_actions: torch.Tensor
    """[N, ...], actions as the policy sampled them; see `ActionHead`."""
    logprobs: torch.Tensor
    """[N], log-probabilities of the actions under the policy that sampled them."""
    values: torch.Tensor
    """[N], the critic's values of the observations before the update."""
    advantages: torch.Tensor
    """[N]"""
    value_targets: torch.Tensor
    """[N], targets of the critic."""

    def __len__(self) -> int:
        return len(self.logprobs)

    def select(self, indices: torch.Tensor) -> Frames:
        return replace(self, **{field.name: getattr(self, field.name)[indices] for field in fields(self)})


@dataclass(frozen=True)
class FrameOutputs:
    """Outputs of policy and critic for frames, with gradients."""

    logprobs: torch.Tensor
    """[N], log-probabilities of the actions."""
    entropy: torch.Tensor
    """[N], entropies of the current action distributions."""
    values: torch.Tensor
    """[N], the critic's values of the observations."""


@dataclass(frozen=True)
class FrameLosses:
    """Mean losses of policy and critic over a minibatch of frames, with metrics."""

    policy: torch.Tensor
    critic: torch.Tensor
    metrics: Mapping[str, torch.Tensor]
    """Means over the frames."""


class FrameLoss(Protocol):
    """A loss for policy and critic."""

    def __call__(self, outputs: FrameOutputs, frames: Frames) -> FrameLosses: ...
