"""Frames in the order in which they come, in arrays that grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from lucidrl.envs.arrays import Key
from lucidrl.envs.tensordicts import quick_view, tensordict_of

Rows = Mapping[Key, Any]
"""One row for each env, as arrays or tensors."""


class FrameStore:
    """Gathers rows, and gives them as a TensorDict.

    Args:
        room: for how many frames there is memory at first.
    """

    def __init__(self, room: int):
        self._room = room
        self._tensors: dict[Key, torch.Tensor] = {}
        self._views: dict[Key, Any] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, rows: Rows, picked: np.ndarray) -> None:
        """Add those of the rows that are picked by number, in ascending order."""
        end = self._length + len(picked)
        if end > self._room or len(rows) > len(self._tensors):
            self._make_room(rows, end)
        place, block = slice(self._length, end), as_block(picked)
        for key, view in self._views.items():
            view[place] = rows[key][block]
        self._length = end

    def take(self) -> TensorDict:
        """All frames so far, [T], in memory of their own; begins anew."""
        entries = {key: tensor[: self._length].clone() for key, tensor in self._tensors.items()}
        taken = tensordict_of(entries, (self._length,), None)
        self.clear()
        return taken

    def clear(self) -> None:
        """Begin anew."""
        self._length = 0

    def _make_room(self, rows: Rows, num_frames: int) -> None:
        """For so many frames of these entries; of those that are new, earlier frames are zero."""
        if num_frames > self._room:
            self._room = max(num_frames, 2 * self._room)
        for key, source in rows.items():
            like = torch.as_tensor(source)
            larger = torch.zeros(self._room, *like.shape[1:], dtype=like.dtype)
            if key in self._tensors:
                larger[: self._length] = self._tensors[key][: self._length]
            self._tensors[key], self._views[key] = larger, quick_view(larger)


def as_block(picked: np.ndarray) -> slice | np.ndarray:
    """Numbers in ascending order, as a slice if they are neighbours: it takes a quarter of the time to use."""
    first, last = int(picked[0]), int(picked[-1])
    return slice(first, last + 1) if last - first + 1 == len(picked) else picked
