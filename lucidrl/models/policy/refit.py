"""Exports a policy's weights as one stream of full tensors.

Generators on the same node read the weights from shared memory, bucket by bucket; see `pool_for` for the reuse of this
memory. Generators on other nodes receive a broadcast from rank 0; the other ranks only help to gather the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from lucidrl.distributed.checksums import checksums_of
from lucidrl.distributed.rendezvous import free_port
from lucidrl.distributed.shared_memory import pool_for
from lucidrl.distributed.weight_buckets import Bucket, BucketHandle, TensorInfo, checksum_of, digest_of, free_bytes
from lucidrl.distributed.weight_group import TIMEOUT_S, WeightGroup, problem_of
from lucidrl.errors import RefitError
from lucidrl.models.loading import DTYPES
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.introspection import device_id
from lucidrl.models.policy.offload import Offload
from lucidrl.models.policy.sharding import Sharding
from lucidrl.profiling.spans import span


class WeightExport:
    """Sends weights under Hugging Face names, in the configured precision; tied weights are sent once.

    With LoRA it sends the adapters alone, or to an engine that takes no adapters the model with the adapters merged in.

    `stream`, `ipc_handles`, `broadcast` and `checksum` gather tensors: call them on every rank.

    Args:
        config: sets the precision and the bucket size.
        local_rank: rank of this worker on its node.
    """

    def __init__(self, sharding: Sharding, offload: Offload, config: PolicyConfig, local_rank: int):
        self._sharding, self._offload = sharding, offload
        self._device = device = sharding.mesh.device
        self._dtype = DTYPES[config.precision]
        self._bucket_bytes = config.generation.refit_bucket_mb << 20
        self.device_id = device_id(device, local_rank)
        # CPU ranks of a node share its memory: one copy of the weights serves all receivers.
        self._is_writer = device.type == "cuda" or local_rank == 0
        self._merges = config.merges_for_generation
        units, shapes = sharding.units, sharding.shapes
        if self._merges:
            units, shapes = sharding.frozen, sharding.frozen_shapes
        names = [name for unit in units for name in unit.names]
        self._infos = {name: TensorInfo(name, tuple(shapes[name]), self._dtype) for name in names}
        self._version, self._verify = 0, False
        self._is_prepared = False
        """Whether `prepare_for_ipc` was called."""
        self._memory = pool_for(device)
        self._packed: set[str] = set()
        """Names packed in this refit."""
        self._checksums: dict[str, str] = {}
        """Checksums of the tensors that this rank sent in this refit, by name."""
        self._is_collective = False
        self._group: WeightGroup | None = None
        """Set on rank 0 only, which sends the weights."""

    def infos(self) -> list[TensorInfo]:
        """Return name, shape and dtype of every tensor of `stream`, in order."""
        return list(self._infos.values())

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and full tensors, one at a time."""
        return self._tensors(None)

    def _tensors(self, names: set[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the named tensors of `stream`; all if None."""
        if self._merges:
            return self._sharding.merged_weights(names, self._dtype)
        return self._sharding.full_tensors(self._sharding.local_weights(), names, self._dtype)

    def checksum(self) -> str:
        """Return a checksum that equals the checksum of a receiver with the same weights."""
        return checksum_of(self.stream())

    def set_header(self, version: int, verify: bool) -> None:
        """Set the policy version of the next buckets, and whether they carry a digest."""
        self._version, self._verify = version, verify
        self._checksums = {}

    def sent_checksums(self) -> dict[str, str]:
        """Return the checksums of the tensors that this rank sent since `set_header`; {} if another rank sent them."""
        return self._checksums

    @span("refit")
    def prepare_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Start a refit; return name and size in bytes of each weight, and the bytes available for buckets."""
        self._offload.check_weights("prepare_weights_for_ipc")
        self._is_prepared = True
        self._begin_refit()
        free = free_bytes(self._device) + self._memory.spare_bytes()
        return [(info.name, info.size_bytes) for info in self.infos()], float(free)

    @span("refit")
    def ipc_handles(self, keys: Sequence[str]) -> dict[str, tuple[bool, BucketHandle]]:
        """Pack the named weights into one bucket; return device id → (True, handle), or {} if another rank packs it."""
        self._offload.check_weights("get_weights_ipc_handles")
        if not self._is_prepared:
            raise RefitError(
                f"get_weights_ipc_handles was called for {len(keys)} weights before prepare_weights_for_ipc; call "
                "prepare_weights_for_ipc first, on every rank"
            )
        bucket = self._bucket_of(keys)
        stream = self._tensors(set(keys))
        if not self._is_writer:
            for _ in stream:  # takes part in the gathering
                pass
            return {}
        if self._packed & set(keys):  # a repeated request restarts the refit
            self._begin_refit()
        self._packed |= set(keys)
        memory = self._memory.take(bucket.size_bytes)
        bucket.pack((tensor for _, tensor in stream), memory.tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other processes do not wait for this one's streams
        self._note(bucket.unpack(memory.tensor[: bucket.size_bytes]))
        digest = digest_of(memory.tensor[: bucket.size_bytes]) if self._verify else None
        return {self.device_id: (True, BucketHandle(bucket, memory.handle, self._version, digest))}

    def _begin_refit(self) -> None:
        self._memory.begin()
        self._packed = set()

    def join_collective(self, ip: str, port: int, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        """Join the generators' weight group, after leaving an earlier one; generators join at the same time.

        Only rank 0 joins. For arguments, see `WeightGroup.join`.
        """
        self._leave_collective()
        if self._sharding.mesh.rank == 0:
            self._group = WeightGroup.join(ip, port, 0, world_size, self._device, timeout_s)
        self._is_collective = True

    def offer_port(self, ip: str) -> int | None:
        """Return, on rank 0, a free port of the node for `join_collective`."""
        return free_port(ip) if self._sharding.mesh.rank == 0 else None

    def try_join(self, ip: str, port: int, world_size: int, timeout_s: float) -> str | None:
        """`join_collective`, but return the message of a RefitError instead of raising it: the driver can then restart
        generators and retry."""
        return problem_of(lambda: self.join_collective(ip, port, world_size, timeout_s))

    def try_broadcast(self) -> str | None:
        """`broadcast`, but return the message of a RefitError instead of raising it, as `try_join` does."""
        return problem_of(self.broadcast)

    @span("refit")
    def broadcast(self) -> None:
        """Send all weights to the generators, which receive at the same time."""
        self._offload.check_weights("broadcast_weights_for_collective")
        if not self._is_collective:
            raise RefitError(
                "broadcast_weights_for_collective was called before init_collective; call init_collective first, on "
                "every rank, while the generators join"
            )
        stream = self.stream()
        try:
            if self._group is not None:
                self._group.send(self._noted(stream), self.infos(), self._bucket_bytes, self._version, self._verify)
        finally:
            for _ in stream:  # all ranks must finish gathering, even if rank 0 fails to send
                pass

    @span("guard")
    def _note(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compute the checksums of tensors that are sent."""
        self._checksums |= checksums_of(tensors)

    def _noted(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            self._note([(name, tensor.to(self._dtype))])
            yield name, tensor

    def close(self) -> None:
        """Free bucket memory and leave the weight group; may be called twice."""
        self._leave_collective()
        self._is_prepared = False
        self._memory.close()

    def _leave_collective(self) -> None:
        self._is_collective = False
        if self._group is not None:
            self._group.close()
            self._group = None

    def _bucket_of(self, keys: Sequence[str]) -> Bucket:
        if unknown := [key for key in keys if key not in self._infos]:
            raise RefitError(
                f"this policy has no weight {unknown[0]!r} ({len(unknown)} of {len(keys)} keys are unknown); "
                "use names from prepare_weights_for_ipc"
            )
        wanted = set(keys)
        infos = [info for name, info in self._infos.items() if name in wanted]
        if not infos:
            raise RefitError("get_weights_ipc_handles was called without keys; pass at least one name")
        return Bucket.of(infos)
