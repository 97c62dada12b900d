"""Objects on their way between driver and workers: a pickle, and beside it the memory of tensors and arrays, uncopied.

Both ends of the connection are processes of one program that trust each other. Torch is imported where tensors are made
or taken apart: what only relays messages does without it.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import torch

SMALLEST_OWN_PART_BYTES = 1 << 14
"""Smaller buffers stay in the pickle: a part of their own would cost more than the copy."""

_COUNT = struct.Struct(">Q")


@dataclass(frozen=True, eq=False)
class Message:
    """An object as its parts: the pickle first, then the buffers that it refers to.

    Arrays and not memoryviews: one of these that looks at another must not be cleared by the garbage collector, which
    is what happens to a message in the frames of an error.
    """

    parts: Sequence[Any]

    @classmethod
    def of(cls, content: Any) -> Self:
        """Refers to the memory of `content`, which must not change before the message is sent."""
        pickled, buffers = io.BytesIO(), []

        def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < SMALLEST_OWN_PART_BYTES:
                return True
            buffers.append(np.frombuffer(buffer.raw(), np.uint8))
            return False

        _Pickler(pickled, protocol=5, buffer_callback=keep_in_pickle).dump(content)
        return cls([pickled.getvalue(), *buffers])

    def writable(self) -> Message:
        """A copy whose buffers are its own, as the object needs if those of the message are shared with others."""
        pickled, *buffers = self.parts
        return Message([pickled, *(np.array(buffer, np.uint8) for buffer in buffers)])

    def content(self) -> Any:
        """The object; its tensors use the memory of the message."""
        return pickle.loads(self.parts[0], buffers=self.parts[1:])


class Stored(Message):
    """Content that several calls pass on: pickled once, and under Ray once in the object store of each node.

    Pass it as a positional argument of a call; the worker's method gets the content.
    """

    reference: Any = None
    """Ray's reference, once it is in the object store."""


@dataclass(frozen=True)
class _StoredIndex:
    """Stands for the content of a `Stored` argument in the message of its call."""

    index: int


def call_messages(method: Any, args: Sequence[Any], kwargs: Any) -> list[Message]:
    """A call as messages: the call itself, then what its arguments refer to by `Stored`."""
    stored = [arg for arg in args if isinstance(arg, Stored)]
    if stored:
        args = [_StoredIndex(stored.index(arg)) if isinstance(arg, Stored) else arg for arg in args]
    return [Message.of((method, args, kwargs)), *stored]


def call_of(messages: Sequence[Message]) -> tuple[Any, Sequence[Any], Any]:
    """What `call_messages` was given, with the content of stored arguments."""
    method, args, kwargs = messages[0].content()
    stored = [message.content() for message in messages[1:]]
    return method, [stored[arg.index] if isinstance(arg, _StoredIndex) else arg for arg in args], kwargs


def receive_number(connection: socket.socket) -> int:
    """Eight bytes, the highest first; EOFError if the other end is gone."""
    return _COUNT.unpack(_read(connection, _COUNT.size))[0]


def send_messages(connection: socket.socket, messages: Sequence[Message]) -> None:
    """Blocks until the other end has taken all; OSError if that is gone."""
    connection.sendall(_COUNT.pack(len(messages)))
    for message in messages:
        send(connection, message)


def receive_messages(connection: socket.socket) -> list[Message]:
    """Blocks until all have come; EOFError if the other end is gone."""
    return [receive(connection) for _ in range(receive_number(connection))]


def send(connection: socket.socket, message: Message) -> None:
    """Blocks until the other end has taken it; OSError if that is gone."""
    sizes = [len(message.parts), *(len(part) for part in message.parts)]
    connection.sendall(b"".join(map(_COUNT.pack, sizes)))
    for part in message.parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> Message:
    """Blocks until a message has come whole; EOFError if the other end is gone."""
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
    """Offers the memory of ordinary CPU tensors as buffers; torch's own way copies it several times."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        memory: Any = value.contiguous().view(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(memory), value.dtype, tuple(value.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    import torch

    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.frombuffer(memory, dtype=dtype).view(shape)
