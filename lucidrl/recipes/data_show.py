"""`lucidrl data show`: print the first rendered prompts of a dataset, their lengths, and which rows are dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lucidrl.data.items import Skip
from lucidrl.data.stream import MOST_SURVEYED, Dataset
from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import ExampleRunConfig, GRPORunConfig, RolloutRunConfig, SFTRunConfig
from lucidrl.recipes.preference_configs import DPORunConfig
from lucidrl.recipes.text_inputs import TextInputs
from lucidrl.utils.config import load_config

_NUM_BINS = 10
_BAR_WIDTH = 40
_LONGEST_SHOWN = 20_000
"""Most characters of a printed prompt."""


def show_data(file: str | None, overrides: Sequence[str], *, num_rows: int = 3, algorithm: str = "grpo") -> None:
    """Print what a run with these settings would read.

    Args:
        file: `data.file`; None if the overrides set it.
        num_rows: number of rendered rows to print.
        algorithm: `grpo` shows prompts, `sft` examples, `dpo` preferences.

    Raises:
        LucidError: settings, file or rows are invalid; names the first problem.
    """
    schemas: dict[str, Any] = {"grpo": GRPORunConfig, "sft": SFTRunConfig, "dpo": DPORunConfig}
    if algorithm not in schemas:
        raise ConfigError(f"--algorithm={algorithm} has no dataset; choose grpo, sft or dpo")
    config = load_config(schemas[algorithm], {"data": {"file": file}} if file else {}, overrides=overrides)
    if config.data.file is None:
        raise ConfigError("no file is named; give its path, such as `lucidrl data show train.parquet`")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with closing(TextInputs(config)) as inputs:
        _show_first(console, inputs, inputs.rows, num_rows)
        survey = inputs.survey
        console.print(_rows_table(inputs, config))
        console.print(_histogram(survey.lengths))
        console.print(f"longest: {survey.longest:,} tokens, {survey.longest_label}")


def _show_first(console: Console, inputs: TextInputs, dataset: Dataset[Any], num_rows: int) -> None:
    """Print the first rows in the order of the files, as the model reads them."""
    rows = islice(dataset.spread(most_rows=10**18), MOST_SURVEYED)
    used = (item for _, item in rows if not isinstance(item, Skip))
    for item in islice(used, num_rows):
        ids = inputs.token_ids(item)
        console.print(Text(f"── {item.label}, {len(ids):,} tokens", style="bold"))
        console.print(Text(_printable(str(inputs.tokenizer.decode(ids)))))
        if others := getattr(item, "info", {}):
            console.print(Text(f"── other columns: {_printable(repr(others), 500)}", style="dim"))
    console.print()


def _printable(text: str, longest: int = _LONGEST_SHOWN) -> str:
    """The text with control characters escaped, cut to `longest` characters."""
    cut = text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in cut)


def _rows_table(inputs: TextInputs, config: RolloutRunConfig | ExampleRunConfig) -> Table:
    """Table: how many rows are used, held out and dropped, and which setting causes each number."""
    survey = inputs.survey
    table = Table("rows", "", "", box=None, pad_edge=False)
    table.add_row("in the files", f"{survey.num_rows:,}", "")
    if not survey.is_complete:
        table.add_row("checked", f"{survey.num_checked:,}", f"evenly spread; at most {MOST_SURVEYED:,}")
    train = survey.estimate(survey.num_train)
    table.add_row("for training", train, f"{config.data.limit:,} of them are used" if config.data.limit else "")
    table.add_row("held out for validation", survey.estimate(survey.num_held_out), _reason_of_split(config))
    reasons = {Skip.WHERE: config.data.where, Skip.LENGTH: config.data.max_prompt_tokens}
    for reason, number in survey.skipped.items():
        table.add_row(f"dropped by {reason}", survey.estimate(number), f"{reason}={reasons[reason]}")
    context = inputs.facts.context_length
    room = int(isinstance(config, RolloutRunConfig))
    if too_long := sum(length + room > context for length in survey.lengths):
        remedy = f"the run would stop: the context has {context:,} tokens; set data.max_prompt_tokens={context - room}"
        table.add_row("too long", survey.estimate(too_long), remedy)
    return table


def _reason_of_split(config: RolloutRunConfig | ExampleRunConfig) -> str:
    if config.data.validation_file is not None:
        return f"data.validation_file={config.data.validation_file}"
    return f"data.validation_fraction={config.data.validation_fraction:g}"


def _histogram(lengths: Sequence[int]) -> Table:
    """Numbers of rows by length, in bins of equal width."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // _NUM_BINS))
    counts = Counter((length - low) // width for length in lengths)
    table = Table("tokens", "rows", "", box=None, pad_edge=False)
    for number in range((high - low) // width + 1):
        start = low + number * width
        bar = "█" * -(-counts[number] * _BAR_WIDTH // max(counts.values()))
        table.add_row(f"{start:,} to {min(high, start + width - 1):,}", f"{counts[number]:,}", bar)
    return table
