"""The random order of rows: a pure function of seed and position, so a checkpoint stores only the position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from lucidrl.errors import DataError

_ROUNDS = 8
_LEAST_BITS = 6  # the Feistel network mixes numbers of fewer bits less well


class Order(Protocol):
    """An endless order of `size` rows; every epoch has each row once."""

    @property
    def size(self) -> int: ...

    def at(self, position: int) -> int:
        """The row at a position, counted from 0."""
        ...


class KeyedOrder:
    """Each epoch is a new pseudorandom permutation, computed position by position and never stored.

    The permutation is a Feistel network over hashes, on a power of two that is at least the number of rows; a
    result beyond the last row is permuted again ("cycle walking"). It uses no library random generator, because these
    may change between versions.
    """

    def __init__(self, size: int, seed: int) -> None:
        _check_size(size)
        self._size, self._seed = size, seed
        bits = max(_LEAST_BITS, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits

    @property
    def size(self) -> int:
        return self._size

    def at(self, position: int) -> int:
        _check_position(position)
        epoch, value = divmod(position, self._size)
        value = self._permuted(epoch, value)
        while value >= self._size:
            value = self._permuted(epoch, value)
        return value

    def _permuted(self, epoch: int, value: int) -> int:
        low_bits, high_bits = self._low_bits, self._high_bits
        high, low = value >> low_bits, value & ((1 << low_bits) - 1)
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(f"{self._seed}/{epoch}/{number}/{low}".encode(), digest_size=8).digest()
            high, low = low, high ^ (int.from_bytes(digest) & ((1 << high_bits) - 1))
            low_bits, high_bits = high_bits, low_bits
        return high << low_bits | low


class SortedOrder:
    """The order of version 0.1.0, to resume runs of that version: the rows of an epoch are sorted by a hash."""

    def __init__(self, size: int, seed: int) -> None:
        _check_size(size)
        self._size, self._seed = size, seed
        self._epoch = -1
        self._shuffled: list[int] = []

    @property
    def size(self) -> int:
        return self._size

    def at(self, position: int) -> int:
        _check_position(position)
        epoch, offset = divmod(position, self._size)
        if epoch != self._epoch:
            keys = (f"{self._seed}/{epoch}/{row}".encode() for row in range(self._size))
            digests = [hashlib.sha256(key).digest() for key in keys]
            self._epoch, self._shuffled = epoch, sorted(range(self._size), key=digests.__getitem__)
        return self._shuffled[offset]


def choice(weights: list[float], seed: int, position: int) -> int:
    """Draw an index with probability proportional to its weight; a pure function of seed and position."""
    if len(weights) == 1:
        return 0
    digest = hashlib.blake2b(f"{seed}/choice/{position}".encode(), digest_size=8).digest()
    left = int.from_bytes(digest) / 2**64 * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(weights) - 1


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """Divide `count` in proportion to the weights, each share at least 1 if possible; the shares add up to `count`."""
    exact = [count * weight / sum(weights) for weight in weights]
    least = int(count >= len(weights))
    found = [max(least, int(share)) for share in exact]
    while missing := count - sum(found):
        step = 1 if missing > 0 else -1
        numbers = [number for number, share in enumerate(found) if share + step >= least]
        found[max(numbers, key=lambda number: step * (exact[number] - found[number]))] += step
    return found


def _check_size(size: int) -> None:
    if size < 1:
        raise DataError(f"an order of {size} rows is empty; give at least one row")


def _check_position(position: int) -> None:
    if position < 0:
        raise ValueError(f"position={position} must not be negative")
