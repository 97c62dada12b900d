"""Masked token columns and their reductions, shared by all losses.

Shapes: B rows, T tokens. Masked positions are set to 0 before any arithmetic; multiplying the result by the mask would
keep NaN in values and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from lucidrl.errors import DataError
from lucidrl.losses.interfaces import IMPORTANCE_MASK, LossType, TokenOutputs
from lucidrl.losses.reductions import Max, Mean, Min

PROVIDERS: dict[str, str] = {
    "advantages": "compute_advantages returns it",
    "prev_logprobs": "the policy's get_logprobs returns it before the first update (not needed if on_policy=True)",
    "generation_logprobs": "the generator returns it as `logprobs` with its samples",
    IMPORTANCE_MASK: "lucidrl.losses.importance.importance_mask returns it",
    "teacher_logprobs": "the teacher's get_logprobs returns it",
    "reference_policy_logprobs": "the policy's get_reference_policy_logprobs returns it (not needed if "
    "kl_coefficient=0)",
}


def token_column(
    data: Mapping[str, Any], name: str, mask_BT: torch.Tensor, *, per_row_allowed: bool = False
) -> torch.Tensor:
    """Return column `name` as [B, T], 0 where masked.

    Args:
        per_row_allowed: also accept a [B] column and broadcast it over the tokens.

    Raises:
        DataError: the column is missing or has another shape.
    """
    if name not in data:
        raise DataError(f"the batch has no column {name!r}, which the loss reads; add it: {PROVIDERS[name]}")
    column: torch.Tensor = data[name]
    if per_row_allowed and column.shape == mask_BT.shape[:1]:
        column = column[:, None].expand_as(mask_BT)
    return _filled(column, f"column {name!r}", mask_BT)


def token_output(
    outputs: TokenOutputs | torch.Tensor, name: Literal["logprobs", "entropy", "values"], mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return the model output `name` as [B, T], 0 (with gradient 0) where masked."""
    value = getattr(outputs, name, None)
    if value is None:
        raise DataError(f"the model outputs have no {name}; add {name!r} to the `needs` of the loss")
    return _filled(value, name, mask_BT)


def _filled(tensor: torch.Tensor, description: str, mask_BT: torch.Tensor) -> torch.Tensor:
    if tensor.shape != mask_BT.shape:
        raise DataError(
            f"{description} has shape {list(tensor.shape)} but token_mask has {list(mask_BT.shape)}; "
            "token data needs one value per token of input_ids"
        )
    return tensor.masked_fill(~mask_BT, 0)


def global_mean_share(
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    loss_type: LossType,
    global_valid_seqs: torch.Tensor,
    global_valid_toks: torch.Tensor,
    constant_length: int | None = None,
) -> torch.Tensor:
    """Return this micro-batch's summand of a mean over the global batch; the sum over all micro-batches is the mean.

    Token level: mean over valid tokens. Sequence level: mean over each sequence's valid tokens (0 for a sequence
    without valid tokens), then over valid sequences.

    Args:
        constant_length: divide the sum over each sequence's valid tokens by this, not by their number (sequence level).
    """
    values_BT = values_BT.masked_fill(~mask_BT, 0)
    if loss_type is LossType.TOKEN_LEVEL:
        return values_BT.sum() / global_valid_toks.clamp(min=1)
    of_rows_B = row_means(values_BT, mask_BT) if constant_length is None else values_BT.sum(dim=1) / constant_length
    return of_rows_B.sum() / global_valid_seqs.clamp(min=1)


def row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """[B] mean over each row's valid tokens, 0 for a row without valid tokens; `values_BT` must be 0 where masked."""
    return values_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)


def token_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> Mean:
    """Metric: the mean over valid tokens."""
    count = mask_BT.sum()
    # Summed in float64, so that the reduced mean does not depend on how a large batch was split.
    total = values_BT.detach().masked_fill(~mask_BT, 0).sum(dtype=torch.float64)
    return Mean(total / count.clamp(min=1), weight=count)


def token_min(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> Min:
    """Metric: the smallest value of a valid token."""
    return Min(values_BT.detach().masked_fill(~mask_BT, torch.inf).amin())


def token_max(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> Max:
    """Metric: the largest value of a valid token."""
    return Max(values_BT.detach().masked_fill(~mask_BT, -torch.inf).amax())
