"""New weights for a generator: staged beside the version in use, then swapped in as a whole.

The model only ever computes with a complete version. The next refit drops a version that was interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lucidrl.distributed.shared_memory import AttachedMemory, DeviceMemoryHandle, MemoryHandle, open_device_memory
from lucidrl.distributed.weight_buckets import BucketHandle, checksum_of, copy_weights, digest_of
from lucidrl.errors import RefitError
from lucidrl.profiling.spans import span


class WeightReceiver:
    """Stages new weights for a model, which keeps its own until `commit`.

    Weights in shared host memory are used in place: the sender does not overwrite memory in use, and the memory
    outlives the sender. All other weights are copied into memory of this process.

    Args:
        model: its parameters are swapped; their current values are version 0.
        device_id: the policy's name for the device of this process.
    """

    def __init__(self, model: nn.Module, device_id: str):
        self.version = 0
        """Version of the weights in use."""
        self._live = dict(model.named_parameters())
        self._device = next(iter(self._live.values())).device
        self._device_id = device_id
        self._incoming: int | None = None
        self._staged: dict[str, torch.Tensor] = {}
        """Weights of the incoming version so far."""
        self._shared: dict[str, AttachedMemory] = {}
        """Sender's memory, by token, that holds the version in use; empty if that was copied."""
        self._incoming_shared: dict[str, AttachedMemory] = {}
        self._released: dict[str, AttachedMemory] = {}
        """Sender's memory of the version before, which the sender may reuse for the next one."""
        self._own: dict[str, torch.Tensor] = {}
        """Memory of this process to copy the incoming version to."""

    def begin(self, version: int) -> None:
        """Expect all weights of a version; drop those staged for another one."""
        self._incoming, self._staged = version, {}
        for memory in self._incoming_shared.values():
            memory.release()
        self._incoming_shared = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Stage a copy of one weight; on a GPU the copy is ordered on the current stream and may still run."""
        self._check(name, tensor)
        if name not in self._own:
            self._own[name] = torch.empty_like(self._live[name].data)
        copy_weights([(self._own[name], tensor)])
        self._staged[name] = self._own[name]

    @span("refit")
    def take(self, handles: Mapping[str, tuple[bool, BucketHandle]]) -> None:
        """Stage a packed bucket; the sender may reuse its device memory as soon as this returns.

        Args:
            handles: results of `get_weights_ipc_handles`, by device id.
        """
        if self._device_id not in handles:
            raise RefitError(
                f"the policy has weights for the devices {', '.join(sorted(handles)) or 'none'}, but this generator is "
                f"on {self._device_id}; use the same devices, or set policy.generation.refit=collective"
            )
        _, handle = handles[self._device_id]
        if handle.version != self._incoming:
            raise RefitError(
                f"a bucket has version {handle.version}, but version {self._incoming} is expected; begin the refit "
                "with the version that the policy sends"
            )
        memory = self._opened(handle.memory)[: handle.bucket.size_bytes]
        if handle.digest is not None and (found := digest_of(memory)) != handle.digest:
            raise RefitError(
                f"a bucket of version {handle.version} ({handle.bucket.tensors[0].name} and "
                f"{len(handle.bucket.tensors) - 1} more) has SHA-256 {found[:12]}…, not {handle.digest[:12]}…: it was "
                "changed on its way; the generator keeps its version, refit again"
            )
        for name, tensor in handle.bucket.unpack(memory):
            if memory.is_cpu:
                self._check(name, tensor)
                self._staged[name] = tensor
            else:
                self.put(name, tensor)
        self._wait_for_copies()

    @span("refit")
    def commit(self, version: int) -> None:
        """Swap in the staged weights, without a copy.

        Raises:
            RefitError: if a weight is missing; the model keeps its version.
        """
        if version != self._incoming:
            raise RefitError(
                f"version {version} cannot be committed: {self._incoming} is expected; begin the refit with that "
                "version"
            )
        if missing := [name for name in self._live if name not in self._staged]:
            raise RefitError(
                f"version {version} is incomplete: {missing[0]} is missing ({len(missing)} of {len(self._live)} "
                f"weights); the generator keeps version {self.version}, refit again"
            )
        self._wait_for_copies()
        before = {name: parameter.data for name, parameter in self._live.items()}
        for name, parameter in self._live.items():
            parameter.data = self._staged[name]
        # The next copies go to the memory of the version before, unless the sender owns that, or the current one.
        self._own = {} if self._shared or self._incoming_shared else before
        for memory in self._shared.values():
            memory.release()
        self._released, self._shared, self._incoming_shared = self._shared, self._incoming_shared, {}
        self.version, self._incoming, self._staged = version, None, {}

    def checksum(self) -> str:
        """SHA-256 of the weights in use; see `checksum_of`."""
        return checksum_of(self._live.items())

    def _opened(self, handle: MemoryHandle) -> torch.Tensor:
        """The sender's memory as bytes; host memory is held as long as its version is in use."""
        if isinstance(handle, DeviceMemoryHandle):
            return open_device_memory(handle)
        known = self._incoming_shared.get(handle.token) or self._released.get(handle.token)
        memory = self._incoming_shared[handle.token] = known or AttachedMemory(handle)
        memory.hold()
        return memory.tensor

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._live:
            raise RefitError(f"this model has no weight {name}; use the same model for generator and policy")
        own = self._live[name]
        if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            raise RefitError(
                f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype} in the policy, but {tuple(own.shape)} and "
                f"{own.dtype} in this generator; use the same model and precision for both"
            )

    def _wait_for_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
