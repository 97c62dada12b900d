"""The reference policy: the weights a run started from, exchanged with the current ones while they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class ReferencePolicy:
    """Holds a copy of a model's weights."""

    def __init__(self, model: nn.Module):
        self._weights = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the reference weights; afterwards, also on an exception, its own again.

        Nothing is copied: parameter and snapshot trade their memory.
        """
        traded = 0
        try:
            for parameter, weights in self._weights:
                _trade(parameter, weights)
                traded += 1
            yield
        finally:
            for parameter, weights in self._weights[:traded]:
                _trade(parameter, weights)


def _trade(parameter: nn.Parameter, weights: torch.Tensor) -> None:
    parameter.data, weights.data = weights.data, parameter.data
