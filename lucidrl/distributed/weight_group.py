"""Weights from a policy to generators outside its training world: packed buckets over a process group of their own.

Every refit is a header and then buckets, each broadcast while the sender packs the next one and the receivers put the
one before in its place. What the tensors are called and how they look was told once before; from that and the header
both sides plan the same buckets. How large these may be, the members agree on by the memory that each has.
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
"""Deadline of the meeting and of each bucket, unless another is asked for; a dead member is noticed at once."""

_SENDER = 0
_IN_FLIGHT = 2
_DIGEST_BYTES = hashlib.sha256().digest_size
_ANNOUNCE = "give the receivers the answer of prepare_info_for_collective of the policy that sends"


class WeightSink(Protocol):
    """Where received weights go."""

    def begin(self, version: int) -> None:
        """The tensors of this version follow."""

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor, whose memory is the next bucket's afterwards."""


class _Header(NamedTuple):
    """What the sender decides about a refit."""

    version: int
    bucket_bytes: int
    verify: int
    fingerprint: int
    """Of the names, shapes and dtypes that follow."""


class WeightGroup:
    """One sender, rank 0, and its receivers; joined once and used for every refit.

    It holds memory for two buckets. After a failure in the middle of a refit it is closed, so that the other members
    learn of it at once, and of no use any more.

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
        # Not in local variables: each holds the connections open, as would the frames of an error.
        self._under_way: deque[Any] = deque()

    @classmethod
    def join(
        cls, ip: str, port: int, rank: int, world_size: int, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> WeightGroup:
        """Meet the other members at an address of rank 0's machine.

        Args:
            ip: of the interface that rank 0 is to listen on, and no other.
            port: a free one there.
            rank: 0 for the sender, generators from 1.
            world_size: number of all members.
            device: where the buckets lie; CUDA members need a GPU each.
            timeout_s: deadline of the meeting and of each bucket.

        Raises:
            RefitError: if they do not meet in time, or disagree.
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
        """On rank 0: send one version of the weights to all others, which must be in `receive`.

        Args:
            weights: full tensors by name, in the order of `infos`; rounded to their dtypes on the way.
            infos: what the receivers were told.
            most_bucket_bytes: size of a bucket, unless a member lacks memory for two or a tensor is larger.
            version: of the weights.
            verify: send a SHA-256 with every bucket, for the receivers to check.

        Raises:
            RefitError: if a receiver is gone or too late, a member has too little memory, or the weights are not those
                of `infos`.
        """
        with self._closed_by_failure():
            bucket_bytes = fitting_bucket_bytes(infos, most_bucket_bytes, self._least_free_bytes())
            buckets = plan_buckets(infos, bucket_bytes)
            header = _Header(version, bucket_bytes, verify, _fingerprint(infos))
            self._start(torch.tensor(header, dtype=torch.int64, device=self.member.device))
            self._finish()
            tensors = _announced(weights, infos)
            for bucket, parcel in zip(buckets, self._parcels(buckets, verify), strict=True):
                if len(self._under_way) == _IN_FLIGHT:
                    self._finish()
                bucket.pack(islice(tensors, len(bucket.tensors)), parcel)
                if verify:
                    parcel[bucket.size_bytes :] = _digest(parcel[: bucket.size_bytes])
                self._start(parcel)
            next(tensors, None)  # raises if there are more
            while self._under_way:
                self._finish()

    @span("refit")
    def receive(self, infos: Sequence[TensorInfo], sink: WeightSink) -> int:
        """On the other ranks: give `sink` one version of the weights as the sender sends it; returns the version.

        Raises:
            RefitError: if the sender is gone or too late, sends other tensors than `infos`, or a bucket that differs
                from its SHA-256. What `sink` has got so far is not a whole version.
        """
        with self._closed_by_failure():
            self._least_free_bytes()
            values = torch.zeros(len(_Header._fields), dtype=torch.int64, device=self.member.device)
            self._start(values)
            self._finish()
            header = _Header(*values.tolist())
            if header.fingerprint != _fingerprint(infos):
                raise RefitError(
                    f"version {header.version} of the weights has other tensors than the {len(infos)} that were "
                    f"announced to this receiver; {_ANNOUNCE}"
                )
            buckets = plan_buckets(infos, header.bucket_bytes)
            sink.begin(header.version)
            arriving: deque[tuple[Bucket, torch.Tensor]] = deque()
            for bucket, parcel in zip(buckets, self._parcels(buckets, bool(header.verify)), strict=True):
                self._start(parcel)
                arriving.append((bucket, parcel))
                if len(arriving) == _IN_FLIGHT:
                    self._put(*arriving.popleft(), header, sink)
            while arriving:
                self._put(*arriving.popleft(), header, sink)
            return header.version

    def close(self) -> None:
        """Leave the group; may be called twice. Gloo waits for a bucket on its way, until its deadline at most."""
        self._under_way.clear()
        if self._backend is not None:
            self._backend.abort()  # nccl would wait for members that are gone
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
                f"the weight group at {self.member.address} is closed, by shutdown or by a refit that failed; "
                "join another one"
            )
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _least_free_bytes(self) -> int:
        """Memory for buckets, of the member that has the least; every member has to ask."""
        held_bytes = sum(memory.nbytes for memory in self._memories)
        least = torch.tensor(free_bytes(self.member.device) + held_bytes, device=self.member.device)
        with self._in_our_words():
            self._under_way.append(self._backend.allreduce(least, dist.ReduceOp.MIN))
        self._finish()
        return int(least)

    def _parcels(self, buckets: Sequence[Bucket], verify: bool) -> Iterator[torch.Tensor]:
        """The memory that each bucket travels in, followed by room for its digest; every other one is the same."""
        room_bytes = _DIGEST_BYTES if verify else 0
        needed_bytes = max((bucket.size_bytes for bucket in buckets), default=0) + room_bytes
        if self._memories[0].numel() < needed_bytes:
            self._memories = []  # before the larger ones are made
            self._memories = [
                torch.empty(needed_bytes, dtype=torch.uint8, device=self.member.device) for _ in range(_IN_FLIGHT)
            ]
        for number, bucket in enumerate(buckets):
            yield self._memories[number % _IN_FLIGHT][: bucket.size_bytes + room_bytes]

    def _put(self, bucket: Bucket, parcel: torch.Tensor, header: _Header, sink: WeightSink) -> None:
        self._finish()
        if header.verify:
            content, digest = parcel[: bucket.size_bytes], parcel[bucket.size_bytes :]
            if not torch.equal(_digest(content), digest.cpu()):
                raise RefitError(
                    f"the bucket of version {header.version} that starts with {bucket.tensors[0].name} differs from "
                    "its SHA-256: it was damaged on the way; check memory and network, then start again"
                )
        for name, tensor in bucket.unpack(parcel):
            sink.put(name, tensor)

    def _start(self, tensor: torch.Tensor) -> None:
        """Send or receive in the background; on CUDA after what the current stream has been given so far."""
        with self._in_our_words():
            self._under_way.append(self._backend.broadcast(tensor, _SENDER))

    def _finish(self) -> None:
        """Wait for the oldest transfer; with a deadline nccl too makes the CPU wait, not only the stream."""
        with self._in_our_words():
            self._under_way[0].wait(self._timeout)
        self._under_way.popleft()

    @contextmanager
    def _in_our_words(self) -> Iterator[None]:
        """What torch raises, in a wait or at once (nccl connects members in the first call), as ours."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("] ")[2].partition(". ")[0] or str(error)
            raise RefitError(
                f"rank {self.member.rank} of the weight group at {self.member.address} could not go on with the "
                f"refit: {reason}; a member has died, refused the weights, or took longer than "
                f"{self._timeout.total_seconds():g} s: see what the other members say, then start them all again"
            ) from error


def problem_of(part: Callable[[], object]) -> str | None:
    """What went wrong in a part of a refit, if anything did.

    For workers that can go on: an error that they raise would end their processes.
    """
    try:
        part()
    except RefitError as error:
        return str(error)
    return None


def _announced(weights: Iterable[tuple[str, torch.Tensor]], infos: Sequence[TensorInfo]) -> Iterator[torch.Tensor]:
    """The tensors, which must come in the order of `infos`, and no more."""
    remaining = iter(weights)
    for info in infos:
        name, tensor = next(remaining, (None, torch.empty(0)))
        if name != info.name:
            raise RefitError(f"{name or 'nothing'} came where {info.name} was announced; {_ANNOUNCE}")
        yield tensor
    for name, _ in remaining:
        raise RefitError(f"{name} came after the last of the weights that were announced; {_ANNOUNCE}")


def _fingerprint(infos: Sequence[TensorInfo]) -> int:
    text = repr([(info.name, tuple(info.shape), info.dtype) for info in infos])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _digest(content: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(digest_of(content)), dtype=torch.uint8)
