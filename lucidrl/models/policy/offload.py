"""Offload weights and optimizer state to host memory, to free the accelerator for other processes.

On a CPU nothing moves, but calls that need offloaded weights fail as on a GPU, so that tests find a missing reload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from lucidrl.errors import ConfigError
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.sharding import Sharding, local_shard


class HostMemory:
    """Offloads the storage of tensors; the tensor objects stay valid, so an optimizer or a profiler may keep them.

    Args:
        takes: returns whether to offload a tensor.
    """

    def __init__(self, takes: Callable[[torch.Tensor], bool] = lambda tensor: not tensor.is_cpu) -> None:
        self._takes = takes
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        """Address of a storage, equal for all views of it → the storage and a host copy of its bytes."""

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy storages to the host and free them; skip tensors that are already offloaded."""
        taken = []
        for tensor in (local_shard(tensor.detach()) for tensor in tensors):
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
            torch.cuda.empty_cache()  # for other processes on this device

    def reload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Undo `offload`; skip tensors that are not offloaded."""
        copies = []
        for tensor in (local_shard(tensor.detach()) for tensor in tensors):
            storage, copy = self._copies.pop(tensor.untyped_storage()._cdata, (None, None))
            if storage is not None and copy is not None:
                storage.resize_(copy.nbytes)
                _bytes_of(tensor).copy_(copy, non_blocking=True)
                copies.append(copy)
        _wait_for_copies()  # before the host copies are freed


class Offload:
    """Offloads and reloads one worker's optimizer and weights, and records which of them are offloaded."""

    def __init__(self, sharding: Sharding, optimizer: PolicyOptimizer | None):
        self.optimizer = optimizer
        self.host_memory = HostMemory()
        self._sharding, self._device = sharding, sharding.mesh.device
        self._are_weights_offloaded = self._is_optimizer_offloaded = False

    def offload_optimizer(self) -> None:
        """Drop gradients and offload the optimizer's tensors."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            self.host_memory.offload(self.optimizer.own_tensors())
        self._is_optimizer_offloaded = True

    def offload_weights(self) -> None:
        self.host_memory.offload(self._weights())
        self._are_weights_offloaded = True

    def reload_optimizer(self) -> None:
        if self.optimizer is not None:
            self.host_memory.reload(self.optimizer.own_tensors())
        self._is_optimizer_offloaded = False

    def reload_weights(self) -> None:
        self.host_memory.reload(self._weights())
        self._are_weights_offloaded = False

    def check_weights(self, what: str) -> None:
        """Raise ConfigError if the weights are offloaded; `what` names the call."""
        if self._are_weights_offloaded:
            raise ConfigError(
                f"{what} needs the weights, which offload_after_refit moved to host memory; "
                "call prepare_for_lp_inference or prepare_for_training first"
            )

    def optimizer_for(self, what: str, alternative: str = "") -> PolicyOptimizer:
        """Return the optimizer; raise ConfigError if there is none or if it is offloaded.

        Args:
            what: the call, for errors.
            alternative: what the caller can do without an optimizer; ends the error.
        """
        self.check_weights(what)
        if self.optimizer is None:
            raise ConfigError(
                f"{what} needs an optimizer, but this policy was created with init_optimizer=False; "
                f"create it with init_optimizer=True{alternative}"
            )
        if self._is_optimizer_offloaded:
            raise ConfigError(
                f"{what} needs the optimizer, which offload_before_refit moved to host memory; "
                "call prepare_for_training first"
            )
        return self.optimizer

    def move(self, tensors: Iterable[torch.Tensor], device: str | torch.device) -> None:
        """Offload tensors if `device` is the host, reload them if it is the worker's device.

        Raises:
            ConfigError: for any other device.
        """
        kind = torch.device(device).type
        if kind == self._device.type:
            self.host_memory.reload(tensors)
        elif kind == "cpu":
            self.host_memory.offload(tensors)
        else:
            raise ConfigError(
                f"device={str(device)!r} is neither the host nor this worker's {self._device.type}; use one of the two"
            )

    def _weights(self) -> list[torch.Tensor]:
        frozen = [unit.parameter for unit in self._sharding.frozen]
        return [*self._sharding.parameters(), *frozen, *self._sharding.model.buffers()]


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return a model's parameters, their gradients and its buffers."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *gradients, *model.buffers()]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
