"""Rows as prompts or examples: made at use, split and filtered one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from lucidrl.data.datasets import is_held_out
from lucidrl.data.order import KeyedOrder
from lucidrl.data.sources import RowSource


class Item(Protocol):
    """A prompt or an example."""

    @property
    def key(self) -> str:
        """Items with equal keys are on the same side of a split."""
        ...

    @property
    def label(self) -> str:
        """How errors name it."""
        ...


T = TypeVar("T", bound=Item)


class Skip(StrEnum):
    """Why a row is not used."""

    HELD_OUT = "held out"
    TRAINING = "not held out"
    WHERE = "data.where"
    LENGTH = "data.max_prompt_tokens"


@dataclass
class Items(Generic[T]):
    """The rows of a source as prompts or examples; each is made at use, and none is kept."""

    source: RowSource
    make: Callable[[Any, str, str], T]
    """Makes the item of (row, place, id)."""
    held_out_fraction: float = 0.0
    """1: all rows are for validation."""
    is_selected: Callable[[Any, str], bool] | None = None
    """Whether a (row, place) passes `data.where`."""
    length: Callable[[T], int] | None = None
    """Number of tokens of an item."""
    max_tokens: int | None = None
    """Longer items are skipped."""
    old_key: Callable[[int], str] | None = None
    """Split key of a row in version 0.1.0, if it was another one."""
    uses_old_key: bool = False

    def read(self, index: int, side: Skip) -> T | Skip:
        """The item of a row, or why it is not used.

        Args:
            side: `TRAINING` or `HELD_OUT`; rows of the other side are skipped.
        """
        row, place = self.source.row(index), self.source.place(index)
        if self.is_selected is not None and not self.is_selected(row, place):
            return Skip.WHERE
        item = self.make(row, place, self.source.row_id(index))
        key = self.old_key(index) if self.uses_old_key and self.old_key is not None else item.key
        found = Skip.HELD_OUT if is_held_out(key, self.held_out_fraction) else Skip.TRAINING
        if found is not side:
            return found
        if self.max_tokens is not None and self.length is not None and self.length(item) > self.max_tokens:
            return Skip.LENGTH
        return item

    def search(self, side: Skip, count: int, most_rows: int | None = None) -> Iterator[tuple[int, T]]:
        """Up to `count` (row, item) of a side, in a fixed random order; reads at most `most_rows` rows."""
        order = KeyedOrder(len(self.source), seed=0)
        num_found = 0
        for position in range(min(len(self.source), most_rows or len(self.source))):
            if num_found == count:
                break
            row = order.at(position)
            item = self.read(row, side)
            if not isinstance(item, Skip):
                num_found += 1
                yield row, item

    def rows_of(self, side: Skip) -> list[int]:
        """All rows of a side, in the order of the source."""
        return [row for row in range(len(self.source)) if not isinstance(self.read(row, side), Skip)]
