"""The reference policy: the weights a run started from, exchanged with the current ones while they are asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_BUFFER_ELEMENTS = 1 << 22


class ReferencePolicy:
    """Holds a copy of a model's weights, in pinned memory where the model is on an accelerator.

    Args:
        weights: the memory that the model computes with; it stays the same memory.
    """

    def __init__(self, weights: Sequence[torch.Tensor]):
        self._weights = list(weights)
        self._kept = [_host_copy(tensor) for tensor in weights]
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        for tensor in self._kept:
            size = min(tensor.numel(), _BUFFER_ELEMENTS)
            known = self._buffers.get(tensor.dtype)
            if known is None or known.numel() < size:
                self._buffers[tensor.dtype] = torch.empty(size, dtype=tensor.dtype, pin_memory=tensor.is_pinned())

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the reference weights; afterwards, also on an exception, its own again.

        The two are exchanged piece by piece through one small buffer: no second copy of the model is ever made.
        """
        exchanged = 0
        try:
            for weights, kept in zip(self._weights, self._kept, strict=True):
                self._exchange(weights, kept)
                exchanged += 1
            yield
        finally:
            for weights, kept in zip(self._weights[:exchanged], self._kept[:exchanged], strict=True):
                self._exchange(weights, kept)

    @torch.no_grad()
    def _exchange(self, weights: torch.Tensor, kept: torch.Tensor) -> None:
        buffer = self._buffers[kept.dtype]
        for ours, theirs in zip(
            weights.view(-1).split(_BUFFER_ELEMENTS), kept.view(-1).split(_BUFFER_ELEMENTS), strict=True
        ):
            held = buffer[: ours.numel()]
            held.copy_(ours)
            ours.copy_(theirs)
            theirs.copy_(held)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
