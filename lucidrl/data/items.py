"""Make prompts or examples from rows when they are used; split and filter them one by one."""

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
        """Split key: items with equal keys are all in training or all in validation."""
        ...

    @property
    def label(self) -> str:
        """How errors name the item."""
        ...


T = TypeVar("T", bound=Item)


class Skip(StrEnum):
    """Why a row is not used; `HELD_OUT` and `TRAINING` also name the two sides of the validation split."""

    HELD_OUT = "held out"
    TRAINING = "not held out"
    WHERE = "data.where"
    LENGTH = "data.max_prompt_tokens"


@dataclass
class Items(Generic[T]):
    """The rows of a source as prompts or examples; an item is made when it is read, and not cached."""

    source: RowSource
    make: Callable[[Any, str, str], T]
    """Makes an item from (row, place, id)."""
    held_out_fraction: float = 0.0
    """Fraction of the rows held out for validation; 1 for a source of validation rows."""
    is_selected: Callable[[Any, str], bool] | None = None
    """Whether `data.where` selects a (row, place); None selects all rows."""
    length: Callable[[T], int] | None = None
    """Returns the number of tokens of an item."""
    max_tokens: int | None = None
    """Items with more tokens are skipped."""
    old_key: Callable[[int], str] | None = None
    """Returns the split key that version 0.1.0 gave a row; None if it was the same key."""
    uses_old_key: bool = False
    """Split by `old_key`, to resume a run of version 0.1.0."""

    def read(self, index: int, side: Skip) -> T | Skip:
        """Return the item of a row, or the reason why the row is not used.

        Args:
            side: read rows of this side of the split, `TRAINING` or `HELD_OUT`; rows of the other side are skipped.
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
        """Yield up to `count` (row, item) of a side, in a fixed random order; read at most `most_rows` rows."""
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
        """Return all rows of a side, in the order of the source."""
        return [row for row in range(len(self.source)) if not isinstance(self.read(row, side), Skip)]
