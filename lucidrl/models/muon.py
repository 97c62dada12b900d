"""Muon: SGD with momentum whose update of each matrix is orthogonalised; AdamW updates all other weights.

Shapes: M rows, N columns of a full matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

OnFullMatrix = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
"""Gathers a full matrix from the shards of all ranks, applies a function, and returns this rank's shard of the result.

Every rank must call it.
"""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates in units of the learning rate; Muon's are scaled to it."""


def matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the trained matrices of a model, without embeddings and the language model's head."""
    others = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        others.add(id(head.weight))
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in others
    }


def newton_schulz(matrix_MN: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return an approximation of U @ V^T, where U @ S @ V^T is the singular value decomposition of the matrix.

    Each step maps every singular value s to a s + b s^3 + c s^5. After five steps, singular values that were at least
    1 % of the Frobenius norm are between 0.68 and 1.2. Matrices in half precision are computed in float32.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x = matrix_MN.to(torch.promote_types(matrix_MN.dtype, torch.float32))
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if is_tall else x).to(matrix_MN.dtype)


class Muon(torch.optim.AdamW):
    """Muon for matrices, AdamW for the rest, with one learning rate and weight decay for both.

    An orthogonalised update of an M x N matrix is scaled by 0.2 sqrt(max(M, N)). Its root mean square is then about
    that of AdamW's updates, so the learning rates of AdamW apply.

    Args:
        matrices: the matrices that Muon updates, and how to gather each of them.
        params: all parameters, or groups of parameters.
        momentum: share of the momentum buffer that remains per step.
        nesterov: add the gradient to the momentum once more before the update.
        ns_steps: Newton-Schulz steps.
        betas: of AdamW.
        eps: of AdamW.
    """

    def __init__(
        self,
        matrices: Mapping[torch.Tensor, OnFullMatrix],
        params: Any,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} is not at least 0 and below 1")
        if ns_steps < 1:
            raise ValueError(f"ns_steps={ns_steps} is less than 1")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        self.defaults |= own
        for group in self.param_groups:
            group |= own
        self._matrices = dict(matrices)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all weights; every rank must call it. Drops the gradients of matrices."""
        assert closure is None, "the caller computes the gradients"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._matrices and parameter.grad is not None:
                    self._update_matrix(parameter, parameter.grad, group)
                    parameter.grad = None  # so that AdamW skips the matrix
        super().step()
        return None

    def _update_matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)  # AdamW expects it when it loads a state
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

        def orthogonalise(full_MN: torch.Tensor) -> torch.Tensor:
            return newton_schulz(full_MN, group["ns_steps"]) * (_ADAMW_RMS * math.sqrt(max(full_MN.shape)))

        update = self._matrices[parameter](direction, orthogonalise)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=float(group["lr"]))
