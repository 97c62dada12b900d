"""Weights on their way out of a policy: one stream of whole tensors, whoever asks for them.

Within one machine they are packed, bucket by bucket, into memory that receivers open; `pool_for` says when it is
written again. To other machines they are broadcast by the first rank; the others only take part in putting the tensors
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lucidrl.distributed.shared_memory import pool_for
from lucidrl.distributed.weight_buckets import Bucket, BucketHandle, TensorInfo, checksum_of, digest_of, free_bytes
from lucidrl.distributed.weight_group import TIMEOUT_S, WeightGroup
from lucidrl.errors import RefitError
from lucidrl.models.loading import DTYPES
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.introspection import device_id
from lucidrl.models.policy.sharding import Sharding
from lucidrl.profiling.spans import span

IpcHandles = dict[str, tuple[bool, BucketHandle]]
"""Id of a device → (packed, where the weights are); see `device_id`."""

TensorForms = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name → (shape, dtype), in the order in which the weights are broadcast."""


class WeightExport:
    """The weights of a policy as others get them: Hugging Face names, configured precision, tied ones once.

    Every rank has to make every call that gathers tensors (`stream`, `ipc_handles`, `broadcast`, `checksum`), since
    each holds a part of them.

    Args:
        config: weights travel in its precision (sharded half-precision policies keep a higher one), and in buckets of
            the size that it sets.
        device: what this rank computes on.
        local_rank: number of this rank on its machine.
    """

    def __init__(self, sharding: Sharding, config: PolicyConfig, device: torch.device, local_rank: int):
        self._sharding, self._device = sharding, device
        self._dtype = DTYPES[config.precision]
        self._bucket_bytes = config.generation.refit_bucket_mb << 20
        self._device_id = device_id(device, local_rank)
        # CPU ranks of a machine share its memory: one copy of the weights is enough for all receivers.
        self._is_writer = device.type == "cuda" or local_rank == 0
        shapes = sharding.shapes()
        self._infos = {name: TensorInfo(name, tuple(shapes[name]), self._dtype) for name in sharding.gather_order()}
        self._version, self._verify = 0, False
        self._parts: list[torch.Tensor] | None = None
        """What this rank holds of the weights, from `prepare_for_ipc` on."""
        self._memory = pool_for(device)
        self._packed: set[str] = set()
        """Names that have been packed in this refit."""
        self._is_collective = False
        self._group: WeightGroup | None = None
        """On the first rank, which sends for all."""

    def infos(self) -> list[TensorInfo]:
        """What the stream gives, in its order."""
        return list(self._infos.values())

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors, one at a time."""
        return self._sharding.full_weights(self._dtype)

    def checksum(self) -> str:
        """The same as that of a receiver with the same weights."""
        return checksum_of(self.stream())

    def set_header(self, version: int, verify: bool) -> None:
        """What the next buckets say about themselves: the version of the weights and, if asked, their digest."""
        self._version, self._verify = version, verify

    @span("refit")
    def prepare_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Begin a refit: names and sizes of all weights, and the bytes that buckets on their way may take together."""
        self._parts = self._sharding.local_weights()
        self._begin_refit()
        free = free_bytes(self._device) + self._memory.spare_bytes()
        return [(info.name, info.size_bytes) for info in self.infos()], float(free)

    @span("refit")
    def ipc_handles(self, keys: Sequence[str]) -> IpcHandles:
        """Packs the named weights into one bucket; ranks that need not write give nothing."""
        parts, bucket = self._prepared_parts(keys), self._bucket_of(keys)
        stream = self._sharding.full_tensors(parts, set(keys), self._dtype)
        if not self._is_writer:
            for _ in stream:  # the others gather with this rank
                pass
            return {}
        if self._packed & set(keys):  # whoever asks again for the same starts over, also without preparing anew
            self._begin_refit()
        self._packed |= set(keys)
        memory = self._memory.take(bucket.size_bytes)
        bucket.pack((tensor for _, tensor in stream), memory.tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # another process does not wait for this one's streams
        digest = digest_of(memory.tensor[: bucket.size_bytes]) if self._verify else None
        return {self._device_id: (True, BucketHandle(bucket, memory.handle, self._version, digest))}

    def _begin_refit(self) -> None:
        self._memory.begin()
        self._packed = set()

    def join_collective(self, ip: str, port: int, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        """Meet the generators, which join at the same time; a group that was joined before is left.

        The first rank meets them on behalf of all. Arguments are those of `WeightGroup.join`.
        """
        self._leave_collective()
        if self._sharding.mesh.rank == 0:
            self._group = WeightGroup.join(ip, port, 0, world_size, self._device, timeout_s)
        self._is_collective = True

    def info_for_collective(self) -> TensorForms:
        """What receivers have to be told once, before the first broadcast."""
        return {info.name: (info.shape, info.dtype) for info in self.infos()}

    @span("refit")
    def broadcast(self) -> None:
        """Send all weights to the generators, which have to receive at the same time."""
        if not self._is_collective:
            raise RefitError(
                "weights were to be broadcast before init_collective; call that first, on every rank, while the "
                "generators join"
            )
        stream = self.stream()
        try:
            if self._group is not None:
                self._group.send(stream, self.infos(), self._bucket_bytes, self._version, self._verify)
        finally:
            for _ in stream:  # the ranks gather together, also when the first one does not send, or cannot
                pass

    def close(self) -> None:
        """Free the memory of buckets and leave the generators; both have to be prepared anew. May be called twice."""
        self._leave_collective()
        self._parts = None
        self._memory.close()

    def _leave_collective(self) -> None:
        self._is_collective = False
        if self._group is not None:
            self._group.close()
            self._group = None

    def _prepared_parts(self, keys: Sequence[str]) -> list[torch.Tensor]:
        if self._parts is None:
            raise RefitError(
                f"handles of {len(keys)} weights were asked for before prepare_weights_for_ipc; call that first, on "
                "every rank: it lists the weights that there are"
            )
        return self._parts

    def _bucket_of(self, keys: Sequence[str]) -> Bucket:
        if unknown := [key for key in keys if key not in self._infos]:
            raise RefitError(
                f"there is no weight {unknown[0]!r} in this policy ({len(unknown)} of {len(keys)} keys are unknown); "
                "ask for names that prepare_weights_for_ipc listed"
            )
        asked = set(keys)
        infos = [info for name, info in self._infos.items() if name in asked]
        if not infos:
            raise RefitError("handles of no weights were asked for; give at least one name")
        return Bucket.of(infos)
