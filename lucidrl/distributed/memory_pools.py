"""Which memory the next bucket of weights is packed into. Fresh memory costs more than the copy, so it is kept."""

from __future__ import annotations

import torch

from lucidrl.distributed.shared_memory import DeviceMemory, SharedMemory


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
