"""Weights and optimizer put away into host memory, to free an accelerator for others for a while.

On a CPU everything is in host memory already and stays where it is; what is away is remembered all the same, so that a
call that is missing on a GPU is missed on a laptop too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from lucidrl.errors import ConfigError
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.sharding import Sharding, local_part


def _is_on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


class HostMemory:
    """Takes the memory of tensors, not the tensors: whoever else holds them finds them again when it is brought back.

    An optimizer, a reference policy or a profiler that holds on to a model's weights keeps holding the same ones.

    Args:
        takes: which tensors have to be put away; the others stay.
    """

    def __init__(self, takes: Callable[[torch.Tensor], bool] = _is_on_accelerator) -> None:
        self._takes = takes
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        """By the identity of the memory, which views of it share: the memory itself, and the bytes it had."""

    def put_away(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the tensors' memory to the host and free it; what is away already stays so."""
        taken = []
        for tensor in (local_part(tensor.detach()) for tensor in tensors):
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or not self._takes(tensor):
                continue
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            copy.copy_(_bytes_of(tensor), non_blocking=True)
            self._copies[storage._cdata] = (storage, copy)
            taken.append(storage)
        _wait_for_copies()
        for storage in taken:
            storage.resize_(0)
        if taken and torch.cuda.is_available():
            torch.cuda.empty_cache()  # others on this device are to have it

    def bring_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Undo `put_away` for those of the tensors that are away."""
        copies = []
        for tensor in (local_part(tensor.detach()) for tensor in tensors):
            storage, copy = self._copies.pop(tensor.untyped_storage()._cdata, (None, None))
            if storage is not None and copy is not None:
                storage.resize_(copy.nbytes)
                _bytes_of(tensor).copy_(copy, non_blocking=True)
                copies.append(copy)
        _wait_for_copies()  # before the copies' memory is given to others


class Offload:
    """What of a worker is away: its optimizer, or its weights too."""

    def __init__(self, sharding: Sharding, optimizer: PolicyOptimizer | None):
        self.optimizer = optimizer
        self.host_memory = HostMemory()
        self._sharding, self._device = sharding, sharding.mesh.device
        self._are_weights_away = self._is_optimizer_away = False

    def put_optimizer_away(self) -> None:
        """Gradients are dropped."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            self.host_memory.put_away(self.optimizer.own_tensors())
        self._is_optimizer_away = True

    def put_weights_away(self) -> None:
        self.host_memory.put_away(self._weights())
        self._are_weights_away = True

    def bring_optimizer_back(self) -> None:
        if self.optimizer is not None:
            self.host_memory.bring_back(self.optimizer.own_tensors())
        self._is_optimizer_away = False

    def bring_weights_back(self) -> None:
        self.host_memory.bring_back(self._weights())
        self._are_weights_away = False

    def check_weights(self, what: str) -> None:
        """Refuse work on weights that are away."""
        if self._are_weights_away:
            raise ConfigError(
                f"{what} needs the weights, which offload_after_refit put into host memory; "
                "call prepare_for_lp_inference or prepare_for_training first"
            )

    def optimizer_for(self, what: str) -> PolicyOptimizer:
        """The optimizer; refuses work on one that is away, or that there is not."""
        self.check_weights(what)
        if self.optimizer is None:
            raise ConfigError(
                f"{what} needs an optimizer, but this policy was made with init_optimizer=False; "
                "make it with one, or leave optimizer_path out to save or load the weights alone"
            )
        if self._is_optimizer_away:
            raise ConfigError(
                f"{what} needs the optimizer, which offload_before_refit put into host memory; "
                "call prepare_for_training first"
            )
        return self.optimizer

    def move(self, tensors: Iterable[torch.Tensor], device: str | torch.device) -> None:
        """Put tensors away if the device is the host, bring them back if it is the worker's own.

        Raises:
            ConfigError: for any other device.
        """
        kind = torch.device(device).type
        if kind == self._device.type:
            self.host_memory.bring_back(tensors)
        elif kind == "cpu":
            self.host_memory.put_away(tensors)
        else:
            raise ConfigError(
                f"device={str(device)!r} is neither the host nor this worker's {self._device.type}; give one of the two"
            )

    def _weights(self) -> list[torch.Tensor]:
        return [*self._sharding.parameters(), *self._sharding.model.buffers()]


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """A model's parameters, their gradients and its buffers."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *gradients, *model.buffers()]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All memory behind a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
