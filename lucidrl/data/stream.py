"""Draw prompts or examples from datasets larger than memory, in a random order that a resume continues exactly."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from lucidrl.data.datasets import Prompt
from lucidrl.data.items import Item, Items, Skip, T
from lucidrl.data.order import KeyedOrder, Order, SortedOrder, choice, shares
from lucidrl.errors import DataError

MOST_SURVEYED = 20_000
"""Most rows that a survey reads; a search for held-out rows reads at least this many before it gives up."""


@dataclass
class Part(Generic[T]):
    """One dataset of a mixture, with its position."""

    items: Items[T]
    weight: float = 1.0
    cursor: int = 0
    """Position in the order; skipped rows count too."""
    rows: Sequence[int] | None = None
    """Rows to draw from; None for all rows."""
    order: Order | None = None

    def start(self, seed: int, limit: int | None) -> None:
        """Set the order of the rows; with a limit, of a fixed subset of the training rows."""
        source = self.items.source
        if limit is not None and limit < len(source):
            self.rows = array("q", [row for row, _ in self.items.search(Skip.TRAINING, limit)])
            if not self.rows:
                raise self._nothing_to_draw()
        self.order = KeyedOrder(len(source) if self.rows is None else len(self.rows), seed)

    def start_sorted(self, seed: int, limit: int | None) -> None:
        """Split and order the rows as version 0.1.0 did; this reads all rows."""
        self.items.uses_old_key = True
        rows = self.items.rows_of(Skip.TRAINING)
        if limit is not None and limit < len(rows):
            order = SortedOrder(len(rows), seed=0)
            rows = [rows[order.at(position)] for position in range(limit)]
        self.rows, self.order = array("q", rows), SortedOrder(len(rows), seed)

    def draw(self, skipped: Counter[Skip]) -> T:
        """Return the next item to train on; add the rows skipped before it to `skipped`, by reason."""
        assert self.order is not None
        for _ in range(2 * self.order.size):  # covers one whole epoch, wherever the cursor is in the current one
            row = self.order.at(self.cursor)
            self.cursor += 1
            item = self.items.read(row if self.rows is None else self.rows[row], Skip.TRAINING)
            if not isinstance(item, Skip):
                return item
            skipped[item] += 1
        raise self._nothing_to_draw()

    def _nothing_to_draw(self) -> DataError:
        source = self.items.source
        return DataError(
            f"{source.name} has no row to train on: all of its {len(source)} rows are held out or filtered; change "
            "data.validation_fraction, data.where or data.max_prompt_tokens"
        )


@dataclass
class Survey:
    """What a survey found in the rows that it read."""

    num_rows: int = 0
    num_checked: int = 0
    """Rows that were read: all of a small dataset, evenly spread rows of a large one."""
    num_train: int = 0
    num_held_out: int = 0
    skipped: Counter[Skip] = field(default_factory=Counter)
    """Filtered rows by reason."""
    lengths: list[int] = field(default_factory=list)
    """Number of tokens of each item."""
    longest: int = 0
    """Number of tokens of the longest item."""
    longest_label: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether all rows were read."""
        return self.num_checked == self.num_rows

    def estimate(self, number: int) -> str:
        """Scale a number of checked rows to all rows; the string begins with "about" unless all rows were checked."""
        if self.is_complete:
            return f"{number:,}"
        return f"about {round(number * self.num_rows / self.num_checked):,}"


class Dataset(Generic[T]):
    """Prompts or examples of one or several datasets, split into training and held-out (validation) items.

    `take` draws training items without end. Each draw selects a dataset at random, by weight; every dataset has a
    random order, which is new in each epoch. The items drawn depend on seed and cursors only.

    Args:
        parts: datasets to train on; without `validation`, a fraction of each is held out.
        validation: separate datasets of held-out items.
        limit: train on this many items only, divided among `parts` by weight.
    """

    def __init__(
        self,
        parts: Sequence[Part[T]],
        *,
        seed: int = 0,
        limit: int | None = None,
        validation: Sequence[Part[T]] | None = None,
    ) -> None:
        self._parts, self._seed = parts, seed
        self._validation = parts if validation is None else validation
        self._weights = [part.weight for part in parts]
        self._limits = [None] * len(parts) if limit is None else shares(limit, self._weights)
        self._is_sorted = False
        self._held_out: dict[int, list[T]] = {}
        self.skipped: Counter[Skip] = Counter()
        """Rows skipped by `take`, by reason."""

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, before any is skipped."""
        sizes = [len(part.items.source) for part in self._parts]
        return sum(size if limit is None else min(size, limit) for size, limit in zip(sizes, self._limits, strict=True))

    @property
    def num_passed(self) -> int:
        """Rows that `take` has read, including skipped rows."""
        return sum(part.cursor for part in self._parts)

    @property
    def is_filtered(self) -> bool:
        """Whether filters may exclude rows from both training and validation."""
        return any(part.items.is_selected or part.items.max_tokens is not None for part in self._parts)

    @property
    def holds_out(self) -> bool:
        """Whether any items are held out for validation."""
        return any(part.items.held_out_fraction > 0 for part in self._validation)

    def take(self, count: int) -> list[T]:
        """Return the next `count` items to train on."""
        return [self._draw() for _ in range(count)]

    def _draw(self) -> T:
        number = choice(self._weights, self._seed, self.num_passed)
        part = self._parts[number]
        if part.order is None:
            part.start(self._seed, self._limits[number])
        return part.draw(self.skipped)

    def held_out(self, count: int) -> list[T]:
        """Return up to `count` held-out items, the same ones at every call.

        Raises:
            DataError: no item is held out, although a fraction or validation rows are configured.
        """
        if count not in self._held_out:
            self._held_out[count] = self._find_held_out(count)
        return self._held_out[count]

    def _find_held_out(self, count: int) -> list[T]:
        if not count or not self.holds_out:
            return []
        found: list[T] = []
        counts = shares(count, [part.weight for part in self._validation])
        for part, share in zip(self._validation, counts, strict=True):
            items = part.items
            if self._is_sorted:
                found += self._sorted_held_out(items, share)
                continue
            most_rows = max(MOST_SURVEYED, round(4 * share / items.held_out_fraction))
            found += [item for _, item in items.search(Skip.HELD_OUT, share, most_rows)]
        if not found:
            raise DataError(
                f"no row is left for validation; raise data.validation_fraction={self._fraction:g}, add rows, "
                "set data.validation_file, or set data.validation_fraction=0 for no validation"
            )
        return found

    def _sorted_held_out(self, items: Items[T], count: int) -> list[T]:
        """Choose held-out items as version 0.1.0 did."""
        rows = items.rows_of(Skip.HELD_OUT)
        order = SortedOrder(max(1, len(rows)), seed=0)
        chosen = range(min(count, len(rows)))
        ordered = [position if items.old_key is not None else order.at(position) for position in chosen]
        read = (items.read(rows[position], Skip.HELD_OUT) for position in ordered)
        return [item for item in read if not isinstance(item, Skip)]

    def survey(self, length: Callable[[T], int], most_rows: int = MOST_SURVEYED) -> Survey:
        """Read and check all rows, or `most_rows` evenly spread rows of a larger dataset.

        Args:
            length: returns the number of tokens of an item.

        Raises:
            DataError: a row is malformed, an id occurs twice, or no row is left for training or for validation.
        """
        result = Survey(num_rows=sum(len(part.items.source) for part in self._all_parts))
        places: dict[str, str | None] = {}
        for side, item in self.spread(most_rows):
            result.num_checked += 1
            if isinstance(item, Skip):
                result.skipped[item] += 1
                continue
            _check_new_id(item, places)
            result.num_held_out += side is Skip.HELD_OUT
            result.num_train += side is Skip.TRAINING
            result.lengths.append(length(item))
            if result.lengths[-1] > result.longest:
                result.longest, result.longest_label = result.lengths[-1], item.label
        self._check_sides(result)
        return result

    def spread(self, most_rows: int) -> Iterator[tuple[Skip, T | Skip]]:
        """Yield evenly spread rows of all datasets: (side of the split, item or the reason why it is filtered)."""
        num_rows = sum(len(part.items.source) for part in self._all_parts)
        for part in self._all_parts:
            size = len(part.items.source)
            number = size if num_rows <= most_rows else max(1, most_rows * size // num_rows)
            for step in range(number):
                row = step * size // number
                item = part.items.read(row, Skip.TRAINING)
                if item is Skip.HELD_OUT:
                    yield Skip.HELD_OUT, part.items.read(row, Skip.HELD_OUT)
                else:
                    yield Skip.TRAINING, item

    @property
    def _all_parts(self) -> Sequence[Part[T]]:
        return self._parts if self._validation is self._parts else [*self._parts, *self._validation]

    def _check_sides(self, survey: Survey) -> None:
        if survey.num_train and (survey.num_held_out or not self.holds_out or not survey.is_complete):
            return
        if sum(survey.skipped.values()) == survey.num_checked:
            dropped = ", ".join(f"{number} by {reason}" for reason, number in survey.skipped.items())
            raise DataError(f"all {survey.num_checked} rows are dropped ({dropped}); change these settings")
        raise DataError(
            f"data.validation_fraction={self._fraction:g} splits {survey.num_train + survey.num_held_out} rows into "
            f"{survey.num_train} for training and {survey.num_held_out} for validation; add rows, or set "
            "data.validation_fraction=0 for no validation"
        )

    @property
    def _fraction(self) -> float:
        return max(part.items.held_out_fraction for part in self._validation)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in every dataset, which is the whole state."""
        if self._is_sorted:
            return {"position": self.num_passed}
        return {"cursors": [part.cursor for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; a state of version 0.1.0 continues in the order of that version."""
        self._is_sorted = "cursors" not in state
        cursors = [state["position"]] if self._is_sorted else state["cursors"]
        if len(cursors) != len(self._parts):
            raise DataError(
                f"the run was saved with {len(cursors)} datasets, but data.file has {len(self._parts)}; resume with "
                "the data.file of the saved run"
            )
        self._held_out.clear()
        for part, cursor, limit in zip(self._parts, cursors, self._limits, strict=True):
            part.cursor = cursor
            if self._is_sorted:
                part.start_sorted(self._seed, limit)


def _check_new_id(item: Item, places: dict[str, str | None]) -> None:
    if not isinstance(item, Prompt):
        return
    first = places.setdefault(item.prompt_id, item.place)
    if first != item.place:
        raise DataError(
            f"{item.place}: has the id {item.prompt_id!r} of {first}; make ids unique, or rename the column"
        )
