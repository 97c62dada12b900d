"""What a loss function is to a policy worker, how metrics say how they are to be reduced, and what can be saved.

Shapes: B rows, T tokens, V vocabulary. Position i of a [B, T] log-probability tensor belongs to token i of
`input_ids`; position 0 has no prediction and holds 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch

from lucidrl.errors import DataError

if TYPE_CHECKING:
    from lucidrl.checkpoint.manifest import FileDigest

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


Metrics = Mapping[str, "float | torch.Tensor | Sum | Mean | Min | Max"]


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
            raise DataError(f"the batch has no column {name!r}; whoever assembles the training batch must add it")
    mask_BT = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    mask_BT[:, 0] = False
    return mask_BT


@dataclass(frozen=True)
class Sum:
    """A metric added up over micro-batches and ranks, such as a share of a globally normalised loss."""

    value: float | torch.Tensor


@dataclass(frozen=True)
class Mean:
    """A metric averaged with `weight`, such as a masked mean with its number of tokens."""

    value: float | torch.Tensor
    weight: float | torch.Tensor


@dataclass(frozen=True)
class Min:
    """A metric of which the smallest value counts; a part with nothing to measure says +inf."""

    value: float | torch.Tensor


@dataclass(frozen=True)
class Max:
    """A metric of which the largest value counts; a part with nothing to measure says -inf."""

    value: float | torch.Tensor


def reduce_metrics(parts: Iterable[tuple[Metrics, float]]) -> dict[str, float]:
    """Reduce micro-batch metrics to one number each; NaN where no part measured anything, or where one is NaN.

    Args:
        parts: (metrics of a micro-batch, number of its valid samples); a bare number is averaged with that weight.
    """
    columns: dict[str, list[Any]] = {}
    for metrics, num_valid_samples in parts:
        for name, metric in metrics.items():
            declared = metric if isinstance(metric, Sum | Mean | Min | Max) else Mean(metric, num_valid_samples)
            columns.setdefault(name, []).append(declared)
    return {name: _reduce(name, column) for name, column in columns.items()}


def _reduce(name: str, column: list[Any]) -> float:
    kind = type(column[0])
    if any(type(metric) is not kind for metric in column):
        raise TypeError(
            f"metric {name!r} is declared with different reductions in one step; use one of them throughout"
        )
    values = [float(metric.value) for metric in column]
    if kind is Sum:
        return sum(values)
    if kind is Min:
        return _extreme(values, math.inf, min)
    if kind is Max:
        return _extreme(values, -math.inf, max)
    weights = [float(metric.weight) for metric in column]
    total = sum(weights)
    # A part without weight says nothing, and its value may be 0/0.
    weighted = (value * weight for value, weight in zip(values, weights, strict=True) if weight)
    return sum(weighted) / total if total else float("nan")


def _extreme(values: list[float], nothing: float, pick: Callable[[list[float]], float]) -> float:
    # min() and max() keep or lose a NaN depending on its place in the list.
    result = math.nan if any(map(math.isnan, values)) else pick(values)
    return math.nan if result == nothing else result


class Stateful(Protocol):
    """A part of a run that goes on where it was left."""

    def state_dict(self) -> Any:
        """Where it stands, as plain values."""
        ...

    def load_state_dict(self, state: Any) -> None: ...


class SavablePolicy(Stateful, Protocol):
    """A policy whose weights and optimizers are files of a checkpoint, whatever it is made of.

    Its `state_dict` has `layout`, a text that tells what it runs on, and `ranks`, with the state of each; that of a
    rank which is a process of its own has its `num_threads` and `random` state under `process`.
    """

    def begin_save(self, folder: Path) -> None:
        """Copy what is to be saved, and write it below a checkpoint's folder while training goes on."""
        ...

    def is_save_written(self) -> bool:
        """Whether what was begun is written."""
        ...

    def finish_save(self) -> dict[Path, FileDigest]:
        """Wait until all is on disk; the files that are large, and what they have to be."""
        ...

    def load(self, folder: Path) -> None:
        """Take weights and optimizers from a checkpoint's folder, which was verified when it was found."""
        ...
