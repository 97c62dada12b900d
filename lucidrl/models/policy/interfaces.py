"""Results of a policy, and options of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

from lucidrl.utils.nsys import POLICY

Role = Literal["policy", "reward"]
"""policy: a language model, which returns log-probabilities; reward: a reward model, which scores rows."""


class LogprobOutputSpec(TypedDict):
    """Log-probabilities of a batch."""

    logprobs: torch.Tensor
    """[B, T] float32; position i is for token i, position 0 and padding are 0."""


class ReferenceLogprobOutputSpec(TypedDict):
    """Log-probabilities of a batch under the reference policy."""

    reference_logprobs: torch.Tensor
    """[B, T] float32; position i is for token i, position 0 and padding are 0."""


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker that are not in its config."""

    seed: int = 0
    """Seed for the weights of an untrained model, and for sampling."""
    timeout_s: float = 600.0
    """Timeout of one collective between ranks."""
    role: Role = "policy"
    """What the model returns; see `Role`."""
    name: str = POLICY
    """First part of the worker's name in profiles."""


@dataclass(frozen=True)
class TrainResult:
    """Result of one `train` call."""

    loss: float
    """Globally normalised loss, averaged over the optimizer updates of the call."""
    grad_norm: float
    """Gradient norm of the last optimizer update, before clipping."""
    metrics: dict[str, float]
    """Metrics of the loss function, with the reductions that the loss function declared."""
    num_skipped_steps: int
    """Optimizer updates skipped because gradients were NaN or infinite."""

    @property
    def logged(self) -> dict[str, float]:
        """All fields as metrics."""
        skipped = float(self.num_skipped_steps)
        return {**self.metrics, "loss": self.loss, "grad_norm": self.grad_norm, "skipped_optimizer_steps": skipped}
