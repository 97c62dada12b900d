"""The receiving end of refits in one process of a replica; a tensor parallel engine has one in each of its ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lucidrl.distributed.checksums import checksums_of
from lucidrl.distributed.weight_buckets import BucketHandle, TensorInfo, free_bytes
from lucidrl.distributed.weight_group import WeightGroup
from lucidrl.distributed.workers.place import Place, place_with
from lucidrl.errors import RefitError
from lucidrl.models.generation.interfaces import RankWeights
from lucidrl.models.generation.receiver import StagedWeights


class RefitRank:
    """Receives weights for one rank of a replica, through shared memory or a broadcast.

    Args:
        receiver: stages the weights and hands complete versions to the engine.
        device_id: id of the rank's device; see `introspection.device_id`.
        index: number of this rank among the tensor parallel ranks of the replica.
    """

    def __init__(self, receiver: StagedWeights, device: torch.device, device_id: str, index: int = 0):
        self.receiver = receiver
        self._device, self._device_id, self._index = device, device_id, index
        self._group: WeightGroup | None = None
        self._announced: list[TensorInfo] = []

    def place(self) -> Place:
        """Return node and device of this rank."""
        return place_with(self._device_id)

    def begin(self, version: int) -> float:
        """Prepare to take the weights of a version; return the free bytes of the device."""
        self.receiver.begin(version)
        return float(free_bytes(self._device))

    def take(self, handles: Mapping[str, tuple[bool, BucketHandle]]) -> None:
        """Stage a packed bucket; see `StagedWeights.take`."""
        self.receiver.take(handles)

    def announce(self, info: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Set the tensors that the policy will broadcast."""
        self._announced = [TensorInfo(name, tuple(shape), dtype) for name, (shape, dtype) in info.items()]

    def join(self, ip: str, port: int, first_rank: int, world_size: int, timeout_s: float) -> None:
        """Leave the current weight group and join a new one, as member `first_rank` + `index`."""
        self.leave()
        self._group = WeightGroup.join(ip, port, first_rank + self._index, world_size, self._device, timeout_s)

    def receive(self) -> None:
        """Stage the weights that the policy broadcasts."""
        if self._group is None:
            raise RefitError(
                "receive_weights was called before join_collective; call prepare_collective and join_collective first"
            )
        self._group.receive(self._announced, self.receiver)

    def check(self, version: int) -> None:
        """Raise RefitError unless all weights of this version are staged."""
        self.receiver.check(version)

    def commit(self, version: int) -> None:
        """Use the staged weights from now on."""
        self.receiver.commit(version)

    def free_copies(self) -> None:
        """Free the copies of weights that the engine does not compute with."""
        self.receiver.free_copies()

    def weights(self) -> RankWeights:
        """Return version and checksums of the weights in use."""
        return RankWeights(self.receiver.version, checksums_of(self.receiver.weights()))

    def leave(self) -> None:
        """Leave the weight group; may be called twice."""
        if self._group is not None:
            self._group.close()
            self._group = None
