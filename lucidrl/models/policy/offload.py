"""Tensors put away into host memory, to free an accelerator for others for a while."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostMemory:
    """Takes the memory of tensors, not the tensors: whoever else holds them finds them again when it is brought back.

    An optimizer or a reference policy that works on a model's weights in place keeps working on the same weights.
    """

    def __init__(self) -> None:
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        """The bytes of each tensor that was put away."""

    def put_away(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the tensors' memory to the host and free it; what is away already stays so."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            copy.copy_(_bytes_of(tensor))
            self._copies[tensor] = copy
            storage.resize_(0)

    def bring_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Undo `put_away` for those of the tensors that are away."""
        for tensor in tensors:
            copy = self._copies.pop(tensor, None)
            if copy is not None:
                tensor.untyped_storage().resize_(copy.nbytes)
                _bytes_of(tensor).copy_(copy)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All memory behind a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
