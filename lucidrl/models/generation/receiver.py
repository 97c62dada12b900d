"""Receives weights in a generator: stages a whole version beside the version in use, then switches to it at once.

So an engine never computes with weights of two versions. After an interrupted refit, the next refit drops the staged
weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import nn

from lucidrl.distributed.shared_memory import AttachedMemory, DeviceMemoryHandle, MemoryHandle, open_device_memory
from lucidrl.distributed.weight_buckets import BucketHandle, checksum_of, copy_weights, digest_of
from lucidrl.errors import RefitError
from lucidrl.profiling.spans import span


class StagedWeights(ABC):
    """Stages new weights; the current weights stay in use until `commit`. A subclass states how to use new weights.

    Weights in shared host memory are used in place: the sender does not overwrite memory in use, and the memory
    outlives the sender. All other weights are copied into memory of this process.

    Args:
        expected: name → tensor of the shape and dtype that each weight must have.
        device: where weights are copied to.
        device_id: id of this process's device; see `introspection.device_id`.
    """

    def __init__(self, expected: Mapping[str, torch.Tensor], device: torch.device, device_id: str):
        self.version = 0
        """Version of the weights in use."""
        self._expected = expected
        self._device = device
        self._device_id = device_id
        self._incoming: int | None = None
        self._staged: dict[str, torch.Tensor] = {}
        """Weights of the incoming version that have arrived so far."""
        self._shared: dict[str, AttachedMemory] = {}
        """The sender's memory with the version in use, by the handle's token; empty if this version was copied."""
        self._incoming_shared: dict[str, AttachedMemory] = {}
        self._released: dict[str, AttachedMemory] = {}
        """The sender's memory with the previous version; the sender may reuse it for the next version."""
        self._own: dict[str, torch.Tensor] = {}
        """Memory of this process that the incoming version is copied to."""

    def begin(self, version: int) -> None:
        """Expect all weights of `version`; drop weights that were staged before."""
        self._incoming, self._staged = version, {}
        for memory in self._incoming_shared.values():
            memory.release()
        self._incoming_shared = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Stage a copy of one weight. On a GPU, the copy runs asynchronously on the current stream."""
        self._check(name, tensor)
        if name not in self._own:
            self._own[name] = torch.empty_like(self._expected[name].data, device=self._device)
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
                "changed in transit; the generator keeps its current weights, refit again"
            )
        for name, tensor in handle.bucket.unpack(memory):
            if memory.is_cpu:
                self._check(name, tensor)
                self._staged[name] = tensor
            else:
                self.put(name, tensor)
        self._wait_for_copies()

    def check(self, version: int) -> None:
        """Check that all weights of `version` are staged.

        Raises:
            RefitError: a weight is missing, or the refit is for another version.
        """
        if version != self._incoming:
            raise RefitError(
                f"version {version} cannot be committed: the current refit is for version {self._incoming}; begin the "
                f"refit with version {version}"
            )
        if missing := [name for name in self._expected if name not in self._staged]:
            raise RefitError(
                f"version {version} is incomplete: {missing[0]} is missing ({len(missing)} of {len(self._expected)} "
                f"weights); the generator keeps version {self.version}, refit again"
            )

    @span("refit")
    def commit(self, version: int) -> None:
        """Use the staged weights from now on.

        Raises:
            RefitError: see `check`; the current weights stay in use.
        """
        self.check(version)
        self._wait_for_copies()
        unused = self._use(self._staged)
        # The next version is copied to memory that is not used any more, unless some of it is the sender's.
        self._own = {} if self._shared or self._incoming_shared else unused
        for memory in self._shared.values():
            memory.release()
        self._released, self._shared, self._incoming_shared = self._shared, self._incoming_shared, {}
        self.version, self._incoming, self._staged = version, None, {}

    def free_copies(self) -> None:
        """Free memory of this process that no weights in use are in; the next version is copied to new memory."""
        self._own = {}

    def checksum(self) -> str:
        """Return the SHA-256 of the weights in use; see `checksum_of`."""
        return checksum_of(self.weights())

    @abstractmethod
    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return names and tensors of the weights in use."""

    @abstractmethod
    def _use(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Switch to a complete version; return tensors that the next version may be copied to."""

    def _opened(self, handle: MemoryHandle) -> torch.Tensor:
        """Return the sender's memory as bytes; keep host memory reserved as long as its version is in use."""
        if isinstance(handle, DeviceMemoryHandle):
            return open_device_memory(handle)
        known = self._incoming_shared.get(handle.token) or self._released.get(handle.token)
        memory = self._incoming_shared[handle.token] = known or AttachedMemory(handle)
        memory.hold()
        return memory.tensor

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._expected:
            raise RefitError(f"this model has no weight {name}; use the same model for generator and policy")
        own = self._expected[name]
        if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            raise RefitError(
                f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype} in the policy, but {tuple(own.shape)} and "
                f"{own.dtype} in this generator; use the same model and precision for both"
            )

    def _wait_for_copies(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class WeightReceiver(StagedWeights):
    """Replaces the weights of a model without a copy.

    Args:
        model: the model whose weights are replaced; its current weights are version 0.
        device_id: id of this process's device.
        names: names of the weights that are replaced; all by default.
    """

    def __init__(self, model: nn.Module, device_id: str, names: Collection[str] | None = None):
        self._live = {name: p for name, p in model.named_parameters() if names is None or name in names}
        super().__init__(self._live, next(iter(self._live.values())).device, device_id)

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._live.items()

    def _use(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        before = {name: parameter.data for name, parameter in self._live.items()}
        for name, parameter in self._live.items():
            parameter.data = weights[name]
        return before


class EngineReceiver(StagedWeights):
    """Passes complete versions to the loader of an engine, which copies the weights into its own layout.

    Args:
        model: the same model, of which only names, shapes and dtypes are used; it may be on the meta device.
        load: called with names and tensors of a version. A name of a tied weight comes with the tensor that it is tied
            to, because an engine may keep a copy.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        device_id: str,
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], None],
    ):
        super().__init__(dict(model.named_parameters()), device, device_id)
        first_name = {id(parameter): name for name, parameter in model.named_parameters()}
        self._source_of = {
            name: first_name[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        """Every name of a weight → the name under which it is received."""
        self._load = load
        self._loaded: dict[str, torch.Tensor] = {}
        """The tensors that were loaded last; empty before the first refit, and after `free_copies`."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._loaded.items()

    def free_copies(self) -> None:
        """Free the tensors that were loaded last, too: the engine has them in its own layout."""
        super().free_copies()
        self._loaded = {}

    def _use(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._load((name, weights[source]) for name, source in self._source_of.items())
        self._loaded = weights
        return weights
