"""The loss protocol: what a policy worker gives a loss function, and what it gets back.

Shapes: B rows, T tokens, V vocabulary; N frames. Position i of a [B, T] log-probability tensor belongs to token i of
`input_ids`; position 0 has no prediction and holds 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from lucidrl.errors import DataError
from lucidrl.losses.reductions import Metrics

Need = Literal["logprobs", "entropy", "values", "logits"]


class LossType(StrEnum):
    """Whether a loss is normalised by the number of valid tokens or of valid sequences."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


@dataclass(frozen=True)
class TokenOutputs:
    """What the model computed for one micro-batch; only what the loss declared in `needs` is set."""

    logprobs: torch.Tensor | None = None
    """[B, T] log-probability of each token given those before it, at the policy's temperature."""
    entropy: torch.Tensor | None = None
    """[B, T] entropy of the distribution each token was drawn from."""
    values: torch.Tensor | None = None
    """[B, T] value estimates (models with the critic role)."""
    logits: torch.Tensor | None = None
    """[B, T, V] next-token logits: position i predicts token i + 1."""


@runtime_checkable
class LossFunction(Protocol):
    """A differentiable objective.

    The result must be the micro-batch's share of the global loss: divide by the global counts given, never by
    the size of the micro-batch, and it will not depend on micro-batch size, packing or the number of ranks.
    A loss whose `needs` is exactly {"logits"} receives the bare [B, T, V] tensor instead of `TokenOutputs`.
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


def valid_token_mask(data: Mapping[str, Any]) -> torch.Tensor:
    """The tokens that count, as [B, T] bool: losses mask by this, and workers count global tokens by it.

    A token counts where `token_mask` and the row's `sample_mask` are not 0, except at position 0, which has no
    prediction.
    """
    for name in ("token_mask", "sample_mask"):
        if name not in data:
            raise DataError(f"the batch has no column {name!r}; add it when the batch is assembled")
    mask_BT = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    mask_BT[:, 0] = False
    return mask_BT


@dataclass(frozen=True)
class Frames:
    """Frames to learn from, in any order."""

    observations: torch.Tensor
    """[N, ...]"""
    latent_actions: torch.Tensor
    """[N, ...], what the policy drew; see `ActionHead`."""
    logprobs: torch.Tensor
    """[N], of these under the policy that drew them."""
    values: torch.Tensor
    """[N], of the observations, by the critic as it was then."""
    advantages: torch.Tensor
    """[N]"""
    value_targets: torch.Tensor
    """[N], what the critic should have said."""

    def __len__(self) -> int:
        return len(self.logprobs)

    def select(self, indices: torch.Tensor) -> Frames:
        return replace(self, **{field.name: getattr(self, field.name)[indices] for field in fields(self)})


@dataclass(frozen=True)
class FrameOutputs:
    """What policy and critic say of frames, with gradients."""

    logprobs: torch.Tensor
    """[N], of the actions that were taken."""
    entropy: torch.Tensor
    """[N], of the distribution they would be drawn from now."""
    values: torch.Tensor
    """[N], of the observations."""


@dataclass(frozen=True)
class FrameLosses:
    """The objectives of both roles over some frames, each a mean over them, and what else was measured."""

    policy: torch.Tensor
    critic: torch.Tensor
    metrics: Mapping[str, torch.Tensor]
    """Means over the frames."""


class FrameLoss(Protocol):
    """An objective for policy and critic."""

    def __call__(self, outputs: FrameOutputs, frames: Frames) -> FrameLosses: ...
