"""Messages between driver and workers: a pickle, followed by the memory of tensors and arrays, which is not copied.

Both ends of a connection are processes of one program and trust each other. Torch is imported only where tensors are
pickled or unpickled, so that relaying a message does not need torch.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import torch

SMALLEST_OWN_PART_BYTES = 1 << 14
"""Smaller buffers stay in the pickle: a separate part would cost more than the copy."""

_COUNT = struct.Struct(">Q")


@dataclass(frozen=True, eq=False)
class Message:
    """A pickled object in parts: the pickle first, then the buffers that the pickle refers to.

    Buffers are numpy arrays, not memoryviews: the garbage collector must not clear a memoryview of a memoryview. It
    would do so with a message in the frames of an error's traceback.
    """

    parts: Sequence[Any]

    @classmethod
    def of(cls, content: Any) -> Self:
        """Pickle `content` without copying its memory, which must not change before the message is sent."""
        pickled, buffers = io.BytesIO(), []

        def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < SMALLEST_OWN_PART_BYTES:
                return True
            buffers.append(np.frombuffer(buffer.raw(), np.uint8))
            return False

        _Pickler(pickled, protocol=5, buffer_callback=keep_in_pickle).dump(content)
        return cls([pickled.getvalue(), *buffers])

    def writable(self) -> Message:
        """Copy the buffers, for a message whose memory is shared with other processes."""
        pickled, *buffers = self.parts
        return Message([pickled, *(np.array(buffer, np.uint8) for buffer in buffers)])

    def content(self) -> Any:
        """Unpickle the object; its tensors use the memory of the message."""
        return pickle.loads(self.parts[0], buffers=self.parts[1:])


class Stored(Message):
    """An argument of several calls: pickled once, and under Ray stored once per node.

    Pass it as a positional argument; the worker's method gets the content.
    """

    reference: Any = None
    """Ray's object reference, once stored."""


@dataclass(frozen=True)
class _StoredIndex:
    """Placeholder of a `Stored` argument in the message of its call."""

    index: int


def call_messages(method: Any, args: Sequence[Any], kwargs: Any) -> list[Message]:
    """A call as messages: the call itself, then its `Stored` arguments."""
    stored = [arg for arg in args if isinstance(arg, Stored)]
    if stored:
        args = [_StoredIndex(stored.index(arg)) if isinstance(arg, Stored) else arg for arg in args]
    return [Message.of((method, args, kwargs)), *stored]


def call_of(messages: Sequence[Message]) -> tuple[Any, Sequence[Any], Any]:
    """The inverse of `call_messages`, with the content of stored arguments."""
    method, args, kwargs = messages[0].content()
    stored = [message.content() for message in messages[1:]]
    return method, [stored[arg.index] if isinstance(arg, _StoredIndex) else arg for arg in args], kwargs


def receive_number(connection: socket.socket) -> int:
    """Receive eight bytes, big-endian; EOFError if the other end is closed."""
    return _COUNT.unpack(_read(connection, _COUNT.size))[0]


def send_messages(connection: socket.socket, messages: Sequence[Message]) -> None:
    """Send all messages; OSError if the other end is closed."""
    connection.sendall(_COUNT.pack(len(messages)))
    for message in messages:
        send(connection, message)


def receive_messages(connection: socket.socket) -> list[Message]:
    """Receive what `send_messages` sent; EOFError if the other end is closed."""
    return [receive(connection) for _ in range(receive_number(connection))]


def send(connection: socket.socket, message: Message) -> None:
    """Send one message; OSError if the other end is closed."""
    sizes = [len(message.parts), *(len(part) for part in message.parts)]
    connection.sendall(b"".join(map(_COUNT.pack, sizes)))
    for part in message.parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> Message:
    """Receive one message; EOFError if the other end is closed."""
    sizes = _read(connection, receive_number(connection) * _COUNT.size)
    return Message([_read(connection, size) for (size,) in _COUNT.iter_unpack(sizes)])


def _read(connection: socket.socket, size_bytes: int) -> Any:
    memory: Any = np.empty(size_bytes, np.uint8)  # a bytearray would be filled with zeros first
    filled = 0
    while filled < size_bytes:
        received = connection.recv_into(memory[filled:].data, flags=socket.MSG_WAITALL)
        if received == 0:
            raise EOFError("the other end closed the connection")
        filled += received
    return memory


class _Pickler(pickle.Pickler):
    """Pickles ordinary CPU tensors as buffers; torch's own reduction copies them several times."""

    def reducer_override(self, value: Any) -> Any:
        if "torch" not in sys.modules:  # then nothing is a tensor
            return NotImplemented
        import torch

        is_plain = (
            type(value) is torch.Tensor
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and value.numel() > 0
            and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
        )
        if not is_plain:
            return NotImplemented
        memory: Any = value.contiguous().view(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(memory), value.dtype, tuple(value.shape))


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.frombuffer(memory, dtype=dtype).view(shape)
