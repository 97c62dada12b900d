"""Make datasets of prompts or examples from files, Python rows or the prompts of an environment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lucidrl.data.columns import Columns
from lucidrl.data.config import DataConfig
from lucidrl.data.datasets import Example, Preference, Prompt, example_of, preferences_of
from lucidrl.data.interfaces import Rows
from lucidrl.data.items import Items, T
from lucidrl.data.json_rows import JsonLines
from lucidrl.data.sources import PythonRows, RowSource, open_source
from lucidrl.data.stream import Dataset, Part
from lucidrl.errors import DataError


class PromptRows:
    """Prompts that an environment returned, as a row source."""

    def __init__(self, prompts: Sequence[Prompt], name: str = "the environment") -> None:
        self.name, self._prompts = name, prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def row(self, index: int) -> Any:
        return self._prompts[index]

    def place(self, index: int) -> str:
        return self.row_id(index)

    def row_id(self, index: int) -> str:
        return self._prompts[index].prompt_id


def prompt_dataset(
    config: DataConfig,
    *,
    seed: int,
    rows: Rows | None = None,
    validation_rows: Rows | None = None,
    length: Callable[[Prompt], int] | None = None,
) -> Dataset[Prompt]:
    """Make a dataset of prompts from `data.file` or from Python rows.

    Args:
        rows: training rows, used instead of `data.file`.
        validation_rows: validation rows, used instead of `data.validation_file`.
        length: returns the number of tokens of a prompt, for `data.max_prompt_tokens`.
    """
    return _dataset(config, Columns.prompt, seed, rows, validation_rows, length)


def example_dataset(
    config: DataConfig,
    *,
    seed: int,
    rows: Rows | None = None,
    validation_rows: Rows | None = None,
    length: Callable[[Example], int] | None = None,
) -> Dataset[Example]:
    """Make a dataset of examples from `data.file` or from Python rows; see `prompt_dataset`."""
    return _dataset(config, Columns.example, seed, rows, validation_rows, length)


def preference_dataset(
    config: DataConfig,
    *,
    seed: int,
    paired: bool = True,
    rows: Rows | None = None,
    validation_rows: Rows | None = None,
    length: Callable[[Preference], int] | None = None,
) -> Dataset[Preference]:
    """Make a dataset of preferences from `data.file` or from Python rows; see `prompt_dataset`.

    Args:
        paired: every row must have a chosen and a rejected completion.
    """
    make = Columns.pair if paired else Columns.preference
    return _dataset(config, make, seed, rows, validation_rows, length)


def dataset_of_prompts(
    prompts: Sequence[Prompt],
    config: DataConfig | None = None,
    *,
    seed: int,
    validation: Sequence[Prompt] | None = None,
) -> Dataset[Prompt]:
    """Make a dataset of prompts that are in memory.

    Args:
        config: `limit` applies and, without `validation`, `validation_fraction`; the other settings have no effect.
            None: use all prompts for training.
        validation: separate validation prompts, if any.
    """
    return _dataset_in_memory(prompts, lambda prompt, place, row_id: prompt, config, seed, validation)


def dataset_of_answers(
    prompts: Sequence[Prompt],
    config: DataConfig | None = None,
    *,
    seed: int,
    validation: Sequence[Prompt] | None = None,
) -> Dataset[Example]:
    """Make a dataset of examples from prompts in memory and the `answer` in their `info`; see `dataset_of_prompts`."""
    return _dataset_in_memory(prompts, lambda prompt, place, row_id: example_of(prompt), config, seed, validation)


def dataset_of_preferences(
    prompts: Sequence[Prompt],
    config: DataConfig | None = None,
    *,
    seed: int,
    validation: Sequence[Prompt] | None = None,
) -> Dataset[Preference]:
    """Make a dataset of preferences from prompts in memory with an `answer`; see `preferences_of`."""
    made = preferences_of(prompts) | preferences_of(validation or ())
    return _dataset_in_memory(prompts, lambda prompt, place, row_id: made[prompt.prompt_id], config, seed, validation)


def _dataset_in_memory(
    prompts: Sequence[Prompt],
    make: Callable[[Any, str, str], T],
    config: DataConfig | None,
    seed: int,
    validation: Sequence[Prompt] | None,
) -> Dataset[T]:
    config = config or DataConfig(validation_fraction=0)
    held_out = None
    if validation is not None:
        held_out = [Part(Items(PromptRows(validation), make, 1.0))] if validation else []
    fraction = config.validation_fraction if validation is None else 0.0
    training = [Part(Items(PromptRows(prompts), make, fraction))]
    return Dataset(training, seed=seed, limit=config.limit, validation=held_out)


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read all prompts of a file, in the order of the file.

    Raises:
        DataError: a row is malformed; the message names file and row.
    """
    source, columns = open_source(str(path)), Columns(DataConfig())
    return [columns.prompt(source.row(row), source.place(row), source.row_id(row)) for row in range(len(source))]


def _dataset(
    config: DataConfig,
    make: Callable[[Columns, Any, str, str], T],
    seed: int,
    rows: Rows | None,
    validation_rows: Rows | None,
    length: Callable[[T], int] | None,
) -> Dataset[T]:
    def part(source: RowSource, weight: float, fraction: float, prefix: str) -> Part[T]:
        columns = Columns(config, prefix)
        items = Items(
            source,
            make=lambda row, place, row_id: make(columns, row, place, row_id),
            held_out_fraction=fraction,
            is_selected=columns.is_selected if config.where else None,
            length=length,
            max_tokens=config.max_prompt_tokens,
            old_key=_line_hash(source) if make is Columns.example and isinstance(source, JsonLines) else None,
        )
        return Part(items, weight)

    validation = None
    if validation_rows is not None:
        validation = [part(PythonRows(validation_rows, "validation_rows"), 1.0, 1.0, "validation/")]
    elif config.validation_file is not None:
        validation = [part(open_source(config.validation_file), 1.0, 1.0, "validation/")]
    fraction = config.validation_fraction if validation is None else 0.0
    if rows is not None:
        if not len(rows):
            raise DataError("the Python rows of the dataset are empty; pass at least one row")
        only = [part(PythonRows(rows), 1.0, fraction, "")]
        return Dataset(only, seed=seed, limit=config.limit, validation=validation)
    files = config.files
    # Rows of several files may have the same ids.
    prefixes = [f"{number}/" if len(files) > 1 else "" for number in range(1, len(files) + 1)]
    parts = [
        part(open_source(entry.file), entry.weight, fraction, prefix)
        for entry, prefix in zip(files, prefixes, strict=True)
    ]
    return Dataset(parts, seed=seed, limit=config.limit, validation=validation)


def _line_hash(source: JsonLines) -> Callable[[int], str]:
    return lambda row: hashlib.sha256(source.content(row)).hexdigest()
