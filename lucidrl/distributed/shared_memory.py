"""Shared memory between processes on this machine: a policy packs weights into it, generators read them there.

Host memory is an anonymous file (`memfd_create`). Other processes of the same user open it as `/proc/<pid>/fd/<number>`
of the process that owns it. The kernel frees the memory when the last process that opened it exits or is killed.
(Memory of `shm_open` would stay in /dev/shm after a kill, and containers limit it, often to 64 MB.) Readers hold a
shared lock on the file, so that the owner knows when it may write again.

Device memory is a CUDA tensor that other processes open by CUDA IPC.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from lucidrl.errors import ConfigError, RefitError

NAME_PREFIX = "lucidrl-"
"""Prefix of the files' names in /proc."""

_DEVICE_ARGUMENT = 6
"""Index of the device among the arguments of `rebuild_cuda_tensor`."""


@dataclass(frozen=True)
class SharedMemoryHandle:
    """Identifies host memory of another process on this machine."""

    pid: int
    descriptor: int
    token: str
    size_bytes: int


@dataclass(frozen=True)
class DeviceMemoryHandle:
    """Lets one other process open device memory of this process, once."""

    arguments: tuple[Any, ...]


MemoryHandle = SharedMemoryHandle | DeviceMemoryHandle


class SharedMemory:
    """Host memory that other processes can open; `tensor` is all of it, as bytes.

    The constructor allocates all pages, so that writing never faults.

    Raises:
        ConfigError: on another system than Linux.
        RefitError: if the machine lacks memory.
    """

    def __init__(self, size_bytes: int):
        if sys.platform != "linux":
            raise ConfigError(
                f"refit through shared memory needs Linux, but this is {sys.platform}; "
                "set policy.generation.refit=collective"
            )
        token = secrets.token_hex(8)
        descriptor = os.memfd_create(NAME_PREFIX + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _allocate(descriptor, size_bytes)
            # Seal the size: reading beyond the end of a shrunk file would kill a process by SIGBUS.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.tensor = _map(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        self.handle = SharedMemoryHandle(os.getpid(), descriptor, token, size_bytes)

    @property
    def size_bytes(self) -> int:
        return self.tensor.nbytes

    @property
    def is_held(self) -> bool:
        """Whether a process holds the memory (`AttachedMemory.hold`)."""
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Let no further process open the memory; the last tensor that uses it frees it. May be called twice."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class DeviceMemory:
    """Memory of a CUDA device that one other process can open; `tensor` is all of it, as bytes."""

    def __init__(self, size_bytes: int, device: torch.device):
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    @property
    def handle(self) -> DeviceMemoryHandle:
        """A new handle per read: torch keeps the memory until every handle was opened and released."""
        _, arguments = reduce_tensor(self.tensor)
        return DeviceMemoryHandle(arguments)

    @property
    def size_bytes(self) -> int:
        return self.tensor.nbytes

    def close(self) -> None:
        """May be called twice."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


class HostPool:
    """Reusable shared-memory segments for the weights: receivers compute with the weights in them, without a copy.

    A later refit writes to a segment only if no process holds it (`AttachedMemory.hold`). So the weights that receivers
    use never change, even if a refit fails. Segments are kept, because allocating them costs more than copying weights.
    """

    def __init__(self) -> None:
        self._written: list[SharedMemory] = []
        """Segments of the current refit; receivers may be about to hold them."""
        self._spare: list[SharedMemory] = []

    def begin(self) -> None:
        """Begin another refit. Receivers that use segments of the previous refit must hold them by now."""
        self._spare += self._written
        self._written = []

    def take(self, size_bytes: int) -> SharedMemory:
        """A segment of at least that size, which no process holds, to pack weights into."""
        free = [memory for memory in self._spare if not memory.is_held]
        fitting = [memory for memory in free if memory.size_bytes >= size_bytes]
        if fitting:
            memory = min(fitting, key=lambda memory: memory.size_bytes)
            self._spare.remove(memory)
        else:
            for too_small in free:
                self._spare.remove(too_small)
                too_small.close()
            memory = SharedMemory(size_bytes)
        self._written.append(memory)
        return memory

    def spare_bytes(self) -> int:
        """Bytes that can be packed without another allocation."""
        return sum(memory.size_bytes for memory in self._spare if not memory.is_held)

    def close(self) -> None:
        """Release all memory; other processes keep what they attached. May be called twice."""
        self.begin()
        while self._spare:
            self._spare.pop().close()


class DevicePool:
    """Two buffers in device memory, used in turn. Receivers copy the weights, because the exit of this process frees
    the buffers.

    `take` reuses the buffer that it returned two calls before; receivers must have copied it by then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[DeviceMemory] = []
        """In the order of writing."""

    def begin(self) -> None:
        """Does nothing."""

    def take(self, size_bytes: int) -> DeviceMemory:
        """A buffer of at least that size, to pack weights into."""
        if len(self._pieces) == 2:
            memory = self._pieces.pop(0)
            if memory.size_bytes >= size_bytes:
                self._pieces.append(memory)
                return memory
            memory.close()
        self._pieces.append(DeviceMemory(size_bytes, self._device))
        return self._pieces[-1]

    def spare_bytes(self) -> int:
        """Bytes that can be packed without another allocation."""
        return sum(memory.size_bytes for memory in self._pieces)

    def close(self) -> None:
        """Release all memory; may be called twice."""
        while self._pieces:
            self._pieces.pop().close()


def pool_for(device: torch.device) -> HostPool | DevicePool:
    """The pool for the device of a policy."""
    return DevicePool(device) if device.type == "cuda" else HostPool()


class AttachedMemory:
    """Host memory of another process; `tensor` is all of it, as bytes, also after that process has exited.

    Between `hold` and `release`, the owner does not write to the memory. Mapping takes about as long as writing, so
    keep the object if the memory will be used again.

    Raises:
        RefitError: if the process has exited or has closed the memory.
    """

    def __init__(self, handle: SharedMemoryHandle):
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RefitError(
                f"the weights of process {handle.pid} cannot be opened ({path}: {error.strerror}); both processes "
                "must run as the same user and in the same container; otherwise set policy.generation.refit=collective"
            ) from error
        weakref.finalize(self, os.close, self._descriptor)
        name = os.readlink(f"/proc/self/fd/{self._descriptor}")
        size_bytes = os.fstat(self._descriptor).st_size
        if handle.token not in name or size_bytes != handle.size_bytes:
            raise RefitError(
                f"{path} is now {name} with {size_bytes} bytes, not the {handle.size_bytes} bytes of weights that "
                f"process {handle.pid} packed; request new handles"
            )
        self.tensor = _map(self._descriptor, size_bytes)

    def hold(self) -> None:
        """Lock the memory until `release`, or as long as this object and tensors made from it live."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let the owner write again; may be called twice."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def open_device_memory(handle: DeviceMemoryHandle) -> torch.Tensor:
    """Device memory of another process, as bytes."""
    arguments = list(handle.arguments)
    # Processes may number devices differently; the current device of the receiver is the right one.
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    return rebuild_cuda_tensor(*arguments)


def _allocate(descriptor: int, size_bytes: int) -> None:
    available = psutil.virtual_memory().available
    try:
        if size_bytes > available:  # the kernel would kill a process instead of refusing
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise RefitError(
            f"a bucket of weights needs {size_bytes:,} bytes of shared memory, but {available:,} are available "
            f"({error.strerror}); free some memory, or use a smaller model: with separate generators, a machine holds "
            "two more copies of the weights"
        ) from error


def _map(descriptor: int, size_bytes: int) -> torch.Tensor:
    # The map has a separate descriptor, and lives as long as the tensor.
    pages = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(pages, dtype=torch.uint8)
