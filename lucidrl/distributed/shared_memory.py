"""Memory that other processes of this machine can use: a policy packs weights into it, generators find them there.

Host memory is a file without a name (`memfd_create`). Others open it through the process that made it, as
`/proc/<pid>/fd/<number>`, which the kernel allows to processes of the same user alone. It is freed when the last
process that has it is gone, however that ended. Memory of `shm_open`, in contrast, has a name in /dev/shm: it stays
there after a killed process until somebody cleans up, and containers allow little of it (often 64 MB). Whoever
uses it holds a shared lock on the file meanwhile, so that its maker knows when to write it again.

Device memory is a CUDA tensor that others open by CUDA IPC.
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
"""Of the files, as /proc shows them."""

_DEVICE_ARGUMENT = 6
"""Which argument of `rebuild_cuda_tensor` is the number of the device."""


@dataclass(frozen=True)
class SharedMemoryHandle:
    """Where a process of this machine finds host memory of another one."""

    pid: int
    descriptor: int
    token: str
    size_bytes: int


@dataclass(frozen=True)
class DeviceMemoryHandle:
    """With what one other process opens device memory of this one, once."""

    arguments: tuple[Any, ...]


MemoryHandle = SharedMemoryHandle | DeviceMemoryHandle


class SharedMemory:
    """Host memory that others may open; `tensor` is all of it, as bytes.

    It is taken when it is made: writing to it neither faults nor fails.

    Raises:
        ConfigError: on another system than Linux.
        RefitError: if the machine has not so much memory.
    """

    def __init__(self, size_bytes: int):
        if sys.platform != "linux":
            raise ConfigError(
                f"weights go through shared memory on Linux only, and this is {sys.platform}; "
                "set policy.generation.refit=collective"
            )
        token = secrets.token_hex(8)
        descriptor = os.memfd_create(NAME_PREFIX + token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _allocate(descriptor, size_bytes)
            # To read behind the end of a file that shrank would end a process by SIGBUS.
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
        """Whether some process has attached it and holds it."""
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """No other process can open it from now on; freed when no tensor uses it any more. May be called twice."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class DeviceMemory:
    """Memory of a CUDA device that one other process may open; `tensor` is all of it, as bytes."""

    def __init__(self, size_bytes: int, device: torch.device):
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    @property
    def handle(self) -> DeviceMemoryHandle:
        """A new one each time: torch keeps the memory until every handle it gave was opened and let go."""
        _, arguments = reduce_tensor(self.tensor)
        return DeviceMemoryHandle(arguments)

    @property
    def size_bytes(self) -> int:
        return self.tensor.nbytes

    def close(self) -> None:
        """May be called twice."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


class HostPool:
    """Memory for whole versions: receivers compute with the weights where they were packed, so none is copied twice.

    A piece is written again in a later refit, once no process holds it: the version that receivers compute with
    is never touched, whatever became of the refits after it. Two versions are held in turn.
    """

    def __init__(self) -> None:
        self._written: list[SharedMemory] = []
        """In this refit; receivers may be about to hold them."""
        self._spare: list[SharedMemory] = []

    def begin(self) -> None:
        """Another refit begins; what was packed in the one before is held by now, or never will be."""
        self._spare += self._written
        self._written = []

    def take(self, size_bytes: int) -> SharedMemory:
        """A piece of at least that size, to be packed now."""
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
        """What can be packed without taking more of the machine's memory."""
        return sum(memory.size_bytes for memory in self._spare if not memory.is_held)

    def close(self) -> None:
        """Let go of it all; what others attached stays with them. May be called twice."""
        self.begin()
        while self._spare:
            self._spare.pop().close()


class DevicePool:
    """Two pieces of device memory, by turns: receivers copy, since it would be gone with the process that made it.

    A piece is written again by the second next call of `take`; by then receivers must have copied what is in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[DeviceMemory] = []
        """That which was written last is last."""

    def begin(self) -> None:
        """Another refit begins."""

    def take(self, size_bytes: int) -> DeviceMemory:
        """A piece of at least that size, to be packed now."""
        if len(self._pieces) == 2:
            memory = self._pieces.pop(0)
            if memory.size_bytes >= size_bytes:
                self._pieces.append(memory)
                return memory
            memory.close()
        self._pieces.append(DeviceMemory(size_bytes, self._device))
        return self._pieces[-1]

    def spare_bytes(self) -> int:
        """What can be packed without taking more of the device's memory."""
        return sum(memory.size_bytes for memory in self._pieces)

    def close(self) -> None:
        """Let go of it all; may be called twice."""
        while self._pieces:
            self._pieces.pop().close()


def pool_for(device: torch.device) -> HostPool | DevicePool:
    """Memory of a policy's device."""
    return DevicePool(device) if device.type == "cuda" else HostPool()


class AttachedMemory:
    """Host memory of another process; `tensor` is all of it, as bytes, also after that process has ended.

    Between `hold` and `release`, its maker does not write it again. To map memory takes about as long as to fill it, so
    what will be held again is worth keeping.

    Raises:
        RefitError: if the process, or this memory of it, is not there.
    """

    def __init__(self, handle: SharedMemoryHandle):
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RefitError(
                f"the weights that process {handle.pid} packed cannot be opened ({path}: {error.strerror}); it must "
                "run as the same user and in the same container; if it is elsewhere, set "
                "policy.generation.refit=collective"
            ) from error
        weakref.finalize(self, os.close, self._descriptor)
        name = os.readlink(f"/proc/self/fd/{self._descriptor}")
        size_bytes = os.fstat(self._descriptor).st_size
        if handle.token not in name or size_bytes != handle.size_bytes:
            raise RefitError(
                f"{path} is now {name} with {size_bytes} bytes, not the {handle.size_bytes} bytes of weights that "
                f"process {handle.pid} packed; ask it for handles again"
            )
        self.tensor = _map(self._descriptor, size_bytes)

    def hold(self) -> None:
        """Ends with `release`, or with this object and the tensors made from it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """Its maker may write it again; may be called twice."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def open_device_memory(handle: DeviceMemoryHandle) -> torch.Tensor:
    """Device memory of another process, as bytes."""
    arguments = list(handle.arguments)
    # Processes may count the devices differently, but whoever got this handle computes on the right one.
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    return rebuild_cuda_tensor(*arguments)


def _allocate(descriptor: int, size_bytes: int) -> None:
    available = psutil.virtual_memory().available
    try:
        if size_bytes > available:  # the kernel would end some process instead of refusing
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise RefitError(
            f"a bucket of weights needs {size_bytes:,} bytes of shared memory, and {available:,} are available "
            f"({error.strerror}); free memory: with separate generators, a machine holds the weights two times more"
        ) from error


def _map(descriptor: int, size_bytes: int) -> torch.Tensor:
    # The map has a descriptor of its own, and lives as long as the tensor.
    pages = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(pages, dtype=torch.uint8)
