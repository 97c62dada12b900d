"""Weights on their way into a generator: a new version is put together beside the one in use, then takes its place.

The model computes with whole versions only. What came of a version that was interrupted is dropped by the next.
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
    """Takes new weights for a model that goes on computing with its own until `commit`.

    Weights that lie in shared host memory are used there, and not copied: their sender does not write it again while
    it is in use, and it stays if the sender ends. All others are copied into memory of this process.

    Args:
        model: its parameters are exchanged; their values are version 0.
        device_id: what the policy calls the device of this process.
    """

    def __init__(self, model: nn.Module, device_id: str):
        self.version = 0
        """Of the weights that the model computes with."""
        self._live = dict(model.named_parameters())
        self._device = next(iter(self._live.values())).device
        self._device_id = device_id
        self._coming: int | None = None
        self._staged: dict[str, torch.Tensor] = {}
        """What has come of it."""
        self._shared: dict[str, AttachedMemory] = {}
        """Memory of the sender, by its token, that the version in use lies in; none if it was copied."""
        self._coming_shared: dict[str, AttachedMemory] = {}
        """The same of the coming one."""
        self._released: dict[str, AttachedMemory] = {}
        """That of the version before, which the next one may come in."""
        self._own: dict[str, torch.Tensor] = {}
        """Memory of this process that copies go to."""

    def begin(self, version: int) -> None:
        """Expect all weights of a version; what came of another one is dropped."""
        self._coming, self._staged = version, {}
        for memory in self._coming_shared.values():
            memory.release()
        self._coming_shared = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take a copy of one weight of the coming version.

        On a GPU the copy may still be under way when this returns; it is ordered on the current stream.
        """
        self._check(name, tensor)
        if name not in self._own:
            self._own[name] = torch.empty_like(self._live[name].data)
        copy_weights([(self._own[name], tensor)])
        self._staged[name] = self._own[name]

    @span("refit")
    def take(self, handles: Mapping[str, tuple[bool, BucketHandle]]) -> None:
        """Take a packed bucket; device memory of the sender may be written again as soon as this returns.

        Args:
            handles: of all devices, as `get_weights_ipc_handles` gave them; this process needs those of its own.
        """
        if self._device_id not in handles:
            raise RefitError(
                f"the policy left weights for the devices {', '.join(sorted(handles)) or 'none'}, but this generator "
                f"is on {self._device_id}; put them on the same devices, or set policy.generation.refit=collective"
            )
        _, handle = handles[self._device_id]
        if handle.version != self._coming:
            raise RefitError(
                f"weights of version {handle.version} came while version {self._coming} is expected; "
                "begin a refit with the version that the policy sends"
            )
        memory = self._opened(handle.memory)[: handle.bucket.size_bytes]
        if handle.digest is not None and (found := digest_of(memory)) != handle.digest:
            raise RefitError(
                f"a bucket of version {handle.version} ({handle.bucket.tensors[0].name} and "
                f"{len(handle.bucket.tensors) - 1} more) has SHA-256 {found[:12]}…, not {handle.digest[:12]}…: it was "
                "changed on its way; the generator keeps the version it has, refit again"
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
        """Compute with the new weights from now on; nothing is copied.

        Raises:
            RefitError: if some weight of this version has not come; the model keeps the version it has.
        """
        if version != self._coming:
            raise RefitError(
                f"version {version} cannot be taken: {self._coming} is expected; begin the refit with that version"
            )
        if missing := [name for name in self._live if name not in self._staged]:
            raise RefitError(
                f"version {version} is not complete: {missing[0]} has not come ({len(missing)} of {len(self._live)} "
                f"weights are missing); the generator keeps version {self.version}, refit again"
            )
        self._wait_for_copies()
        before = {name: parameter.data for name, parameter in self._live.items()}
        for name, parameter in self._live.items():
            parameter.data = self._staged[name]
        # Copies of the next version go to where the one before was, unless that, or this one, is the sender's memory.
        self._own = {} if self._shared or self._coming_shared else before
        for memory in self._shared.values():
            memory.release()
        self._released, self._shared, self._coming_shared = self._shared, self._coming_shared, {}
        self.version, self._coming, self._staged = version, None, {}

    def checksum(self) -> str:
        """SHA-256 of the weights that the model computes with; see `checksum_of`."""
        return checksum_of(self._live.items())

    def _opened(self, handle: MemoryHandle) -> torch.Tensor:
        """The sender's memory as bytes; host memory is held until the version in it is not in use any more."""
        if isinstance(handle, DeviceMemoryHandle):
            return open_device_memory(handle)
        known = self._coming_shared.get(handle.token) or self._released.get(handle.token)
        memory = self._coming_shared[handle.token] = known or AttachedMemory(handle)
        memory.hold()
        return memory.tensor

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse what is no weight of this model."""
        if name not in self._live:
            raise RefitError(f"{name} came, which this model does not have; generator and policy need the same model")
        own = self._live[name]
        if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            raise RefitError(
                f"{name} came with shape {tuple(tensor.shape)} and {tensor.dtype}, and has {tuple(own.shape)} and "
                f"{own.dtype} in this model; generator and policy need the same model and precision"
            )

    def _wait_for_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
