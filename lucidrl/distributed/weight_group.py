"""Weight sync from a policy to separate generators: packed buckets, broadcast over a separate process group.

A refit is a header and then buckets. Each bucket is broadcast while the sender packs the next one and the receivers
unpack the previous one. Sender and receivers know names, shapes and dtypes in advance and plan the same buckets; the
member with the least free memory limits the bucket size.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist

from lucidrl.distributed.rendezvous import Membership, meet
from lucidrl.distributed.weight_buckets import (
    Bucket,
    TensorInfo,
    digest_of,
    fitting_bucket_bytes,
    free_bytes,
    plan_buckets,
)
from lucidrl.errors import RefitError
from lucidrl.profiling.spans import span

TIMEOUT_S = 120.0
"""Default timeout of the rendezvous and of each bucket; the exit of a member is noticed at once."""

_SENDER = 0
_IN_FLIGHT = 2
_DIGEST_BYTES = hashlib.sha256().digest_size
_ANNOUNCE = "pass the result of the policy's prepare_info_for_collective to the receivers"


class WeightSink(Protocol):
    """Consumer of received weights."""

    def begin(self, version: int) -> None:
        """Called before the tensors of a version."""

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor; the caller reuses its memory after the call."""


class _Header(NamedTuple):
    """Parameters of a refit, which the sender broadcasts before the buckets."""

    version: int
    bucket_bytes: int
    verify: int
    fingerprint: int
    """Hash of the names, shapes and dtypes."""


class WeightGroup:
    """The process group for weight transfer: rank 0 sends, the others receive. Joined once, used for every refit.

    Each member holds memory for two buckets. A failed refit closes the group, so that the other members fail at once.

    Example:
        >>> with WeightGroup.join("127.0.0.1", 29400, rank, 2, torch.device("cpu"), timeout_s=60) as group:
        ...     if rank == 0:
        ...         group.send(weights.items(), infos, 64 << 20, version=1, verify=False)
        ...     else:
        ...         version = group.receive(infos, sink)
    """

    def __init__(self, store: Any, backend: Any, member: Membership, timeout_s: float):
        self.member = member
        self._store = store
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._memories = [torch.empty(0, dtype=torch.uint8, device=member.device)] * _IN_FLIGHT
        # Not in local variables: the traceback of an error would keep the connections open.
        self._pending: deque[Any] = deque()

    @classmethod
    def join(
        cls, ip: str, port: int, rank: int, world_size: int, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> WeightGroup:
        """Join the other members at an address of rank 0's machine.

        Args:
            ip: address of the only interface that rank 0 listens on.
            port: a free port at `ip`.
            rank: 0 for the sender, generators from 1.
            world_size: number of members.
            device: device of the buckets; every CUDA member needs its own GPU.
            timeout_s: timeout of the rendezvous and of each bucket.

        Raises:
            RefitError: if an argument is not valid, or members do not meet; see `lucidrl.distributed.rendezvous`.
        """
        member = Membership(ip, port, rank, world_size, device)
        store, backend = meet(member, timeout_s)
        return cls(store, backend, member, timeout_s)

    def send(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        infos: Sequence[TensorInfo],
        most_bucket_bytes: int,
        version: int,
        verify: bool,
    ) -> None:
        """On rank 0: send one version of the weights; all other members must call `receive`.

        Args:
            weights: full tensors by name, in the order of `infos`; converted to the dtypes of `infos`.
            infos: the same as on the receivers.
            most_bucket_bytes: maximum bucket size; lowered if a member lacks memory for two buckets. A tensor that is
                larger gets a separate bucket.
            version: version of the weights.
            verify: send a SHA-256 with every bucket; the receivers check it.

        Raises:
            RefitError: if a receiver exited or timed out, a tensor does not fit a member's memory, or the weights do
                not match `infos`.
        """
        with self._closed_by_failure():
            bucket_bytes = fitting_bucket_bytes(infos, most_bucket_bytes, self._least_free_bytes())
            buckets = plan_buckets(infos, bucket_bytes)
            header = _Header(version, bucket_bytes, verify, _fingerprint(infos))
            self._start(torch.tensor(header, dtype=torch.int64, device=self.member.device))
            self._finish()
            tensors = _announced(weights, infos)
            for bucket, buffer in zip(buckets, self._buffers(buckets, verify), strict=True):
                if len(self._pending) == _IN_FLIGHT:
                    self._finish()
                bucket.pack(islice(tensors, len(bucket.tensors)), buffer)
                if verify:
                    buffer[bucket.size_bytes :] = _digest(buffer[: bucket.size_bytes])
                self._start(buffer)
            next(tensors, None)  # raises if `weights` has more tensors than `infos`
            while self._pending:
                self._finish()

    @span("refit")
    def receive(self, infos: Sequence[TensorInfo], sink: WeightSink) -> int:
        """On the other ranks: pass one version of the weights to `sink`; returns the version.

        Raises:
            RefitError: if the sender exited or timed out, sends other tensors than `infos`, or a bucket does not match
                its SHA-256. `sink` then holds an incomplete version.
        """
        with self._closed_by_failure():
            self._least_free_bytes()
            values = torch.zeros(len(_Header._fields), dtype=torch.int64, device=self.member.device)
            self._start(values)
            self._finish()
            header = _Header(*values.tolist())
            if header.fingerprint != _fingerprint(infos):
                raise RefitError(
                    f"version {header.version} of the weights has other tensors than the {len(infos)} that this "
                    f"receiver expects; {_ANNOUNCE}"
                )
            buckets = plan_buckets(infos, header.bucket_bytes)
            sink.begin(header.version)
            incoming: deque[tuple[Bucket, torch.Tensor]] = deque()
            for bucket, buffer in zip(buckets, self._buffers(buckets, bool(header.verify)), strict=True):
                self._start(buffer)
                incoming.append((bucket, buffer))
                if len(incoming) == _IN_FLIGHT:
                    self._put(*incoming.popleft(), header, sink)
            while incoming:
                self._put(*incoming.popleft(), header, sink)
            return header.version

    def close(self) -> None:
        """Leave the group; may be called twice. Gloo waits for pending transfers, up to their timeout."""
        self._pending.clear()
        if self._backend is not None:
            self._backend.abort()  # nccl would wait for members that have exited
        self._backend = None
        self._store = None
        self._memories = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @contextmanager
    def _closed_by_failure(self) -> Iterator[None]:
        if self._backend is None:
            raise RefitError(
                f"the process group for weight transfer at {self.member.address} was closed by shutdown or a failed "
                "refit; join another one with init_collective"
            )
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _least_free_bytes(self) -> int:
        """Smallest free memory of all members; a collective call."""
        held_bytes = sum(memory.nbytes for memory in self._memories)
        least = torch.tensor(free_bytes(self.member.device) + held_bytes, device=self.member.device)
        with self._as_refit_error():
            self._pending.append(self._backend.allreduce(least, dist.ReduceOp.MIN))
        self._finish()
        return int(least)

    def _buffers(self, buckets: Sequence[Bucket], verify: bool) -> Iterator[torch.Tensor]:
        """The memory for each bucket and its digest; consecutive buckets alternate between two memories."""
        digest_bytes = _DIGEST_BYTES if verify else 0
        needed_bytes = max((bucket.size_bytes for bucket in buckets), default=0) + digest_bytes
        if self._memories[0].numel() < needed_bytes:
            self._memories = []  # free them before allocating larger ones
            self._memories = [
                torch.empty(needed_bytes, dtype=torch.uint8, device=self.member.device) for _ in range(_IN_FLIGHT)
            ]
        for index, bucket in enumerate(buckets):
            yield self._memories[index % _IN_FLIGHT][: bucket.size_bytes + digest_bytes]

    def _put(self, bucket: Bucket, buffer: torch.Tensor, header: _Header, sink: WeightSink) -> None:
        self._finish()
        if header.verify:
            content, digest = buffer[: bucket.size_bytes], buffer[bucket.size_bytes :]
            if not torch.equal(_digest(content), digest.cpu()):
                raise RefitError(
                    f"the bucket of version {header.version} that starts with {bucket.tensors[0].name} does not match "
                    "its SHA-256: it was corrupted in transfer; check memory and network, then restart the run"
                )
        for name, tensor in bucket.unpack(buffer):
            sink.put(name, tensor)

    def _start(self, tensor: torch.Tensor) -> None:
        """Send or receive in the background; on CUDA after the work in the current stream."""
        with self._as_refit_error():
            self._pending.append(self._backend.broadcast(tensor, _SENDER))

    def _finish(self) -> None:
        """Wait for the oldest transfer. The timeout makes nccl block the CPU, as gloo does, and not only the stream."""
        with self._as_refit_error():
            self._pending[0].wait(self._timeout)
        self._pending.popleft()

    @contextmanager
    def _as_refit_error(self) -> Iterator[None]:
        """Convert torch's errors to RefitError; calls raise them too, not only waits, as nccl connects in a call."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("] ")[2].partition(". ")[0] or str(error)
            raise RefitError(
                f"the refit failed on rank {self.member.rank} of the process group for weight transfer at "
                f"{self.member.address}: {reason}; a member exited, refused the weights, or took longer than "
                f"{self._timeout.total_seconds():g} s: see the errors of the other members, then restart all members"
            ) from error


def problem_of(part: Callable[[], object]) -> str | None:
    """Run `part` of a refit; returns the message if it raises RefitError, because the error would end the workers."""
    try:
        part()
    except RefitError as error:
        return str(error)
    return None


def _announced(weights: Iterable[tuple[str, torch.Tensor]], infos: Sequence[TensorInfo]) -> Iterator[torch.Tensor]:
    """The tensors of `weights`; RefitError unless their names are exactly those of `infos`, in order."""
    remaining = iter(weights)
    for info in infos:
        name, tensor = next(remaining, (None, torch.empty(0)))
        if name != info.name:
            found = f"got {name}" if name is not None else "there are no more weights"
            raise RefitError(f"expected the weight {info.name} next, but {found}; {_ANNOUNCE}")
        yield tensor
    for name, _ in remaining:
        raise RefitError(f"got the weight {name} after the last expected one; {_ANNOUNCE}")


def _fingerprint(infos: Sequence[TensorInfo]) -> int:
    text = repr([(info.name, tuple(info.shape), info.dtype) for info in infos])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _digest(content: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digest_of(content)), dtype=torch.uint8)
