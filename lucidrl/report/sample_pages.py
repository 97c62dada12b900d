"""The samples that the page shows: a part of all recorded samples, chosen by rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lucidrl.report.curves import spread
from lucidrl.report.folder_parts import SamplesFile
from lucidrl.report.metrics_file import Record, is_number, read_lines

MOST_SAMPLES, MOST_CHARACTERS = 2000, 4_000_000
"""Samples of a page, and characters of their texts and tokens; the runs of a page share both."""
MOST_FILES = 40
"""Files of samples that the page reads of one run: the first, the last, and evenly spread ones between them."""
MOST_MESSAGE_CHARACTERS = 8000
"""Characters of one message."""
_CHARACTERS_PER_TOKEN = 20  # a token with its two log-probabilities, as JSON


@dataclass(frozen=True)
class ShownSamples:
    """Samples in the form that the page reads, and what was left out."""

    samples: list[dict[str, Any]]
    rule: str | None
    """A sentence about what is left out; None if the page has everything."""
    problems: list[str]
    """Sentences about unreadable files and lines."""


def shown_samples(files: Sequence[SamplesFile], num_runs: int = 1) -> ShownSamples:
    """Choose and read samples: whole groups from the start of each file, the same share of each file."""
    most, most_characters = MOST_SAMPLES // num_runs, MOST_CHARACTERS // num_runs
    chosen = [file for number, file in enumerate(files) if number in spread(len(files), MOST_FILES)]
    samples: list[dict[str, Any]] = []
    problems: list[str] = []
    num_recorded, num_characters, is_cut = 0, 0, False
    for number, file in enumerate(chosen, 1):
        try:
            records = list(read_lines(file.path))
        except OSError as error:
            problems.append(f"samples/{file.path.name} cannot be read ({error.strerror})")
            continue
        rows = [sample for record in records if (sample := _sample(record, file)) is not None]
        if len(rows) < len(records):
            problems.append(f"{len(records) - len(rows)} lines of samples/{file.path.name} cannot be read")
        num_recorded += len(rows)
        is_cut |= any(row.pop("is_cut") for row in rows)
        # What a file leaves over is for the files after it.
        share = most * number // len(chosen) - len(samples)
        fitting = _first_groups(rows, share, most_characters * number // len(chosen) - num_characters)
        samples += fitting
        num_characters += sum(map(_size, fitting))
    return ShownSamples(samples, _rule(len(samples), num_recorded, len(chosen), len(files), is_cut), problems)


def _first_groups(rows: list[dict[str, Any]], most: int, most_characters: int) -> list[dict[str, Any]]:
    """The first groups that fit; of the first group, at least one sample."""
    end, characters = 0, 0
    for start, stop in _groups(rows):
        characters += sum(map(_size, rows[start:stop]))
        if stop > most or characters > most_characters:
            break
        end = stop
    return rows[: end or 1]


def _groups(rows: Sequence[dict[str, Any]]) -> Iterable[tuple[int, int]]:
    start = 0
    for row in range(1, len(rows) + 1):
        if row == len(rows) or rows[row]["group"] is None or rows[row]["group"] != rows[start]["group"]:
            yield start, row
            start = row


def _size(sample: dict[str, Any]) -> int:
    """About the characters that the sample takes in the page."""
    return 100 + sum(
        len(message["content"]) + _CHARACTERS_PER_TOKEN * len(message.get("tokens", ()))
        for message in sample["messages"]
    )


def _sample(record: Record | None, file: SamplesFile) -> dict[str, Any] | None:
    """A sample as the page reads it; None if the line has no messages."""
    if record is None or not isinstance(record.get("messages"), list):
        return None
    messages = [_message(message) for message in record["messages"] if isinstance(message, dict)]
    return {
        "kind": file.name,
        "step": file.step,
        "name": str(record.get("sample", record.get("idx", ""))),
        "group": record["group"] if type(record.get("group")) is int else None,
        "reward": record["reward"] if is_number(record.get("reward")) else None,
        "policy_version": record["policy_version"] if type(record.get("policy_version")) is int else None,
        "truncated": record.get("truncated") is True,
        "dropped": record.get("dropped") is True,
        "messages": messages,
        "is_cut": any(message.pop("is_cut") for message in messages),
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = str(message.get("content", ""))
    is_long = len(content) > MOST_MESSAGE_CHARACTERS
    if is_long:
        left_out = len(content) - MOST_MESSAGE_CHARACTERS
        content = f"{content[:MOST_MESSAGE_CHARACTERS]} … ({left_out:,} more characters)"
    shown: dict[str, Any] = {"role": str(message.get("role", "")), "content": content, "is_cut": is_long}
    tokens, generation = message.get("tokens"), _numbers(message.get("generation_logprobs"))
    if is_long or not isinstance(tokens, list) or generation is None or len(tokens) != len(generation):
        return shown
    shown |= {"tokens": [str(token) for token in tokens], "generation": generation}
    training = _numbers(message.get("training_logprobs"))
    if training is not None and len(training) == len(generation):
        shown["training"] = training
    return shown


def _numbers(values: Any) -> list[float] | None:
    is_list = isinstance(values, list) and all(is_number(value) for value in values)
    return [round(value, 5) for value in values] if is_list else None


def _rule(num_shown: int, num_recorded: int, num_read: int, num_files: int, is_cut: bool) -> str | None:
    rules = []
    if num_read < num_files:
        rules.append(f"{num_read} evenly spread ones of {num_files} files of samples are read")
    if num_shown < num_recorded:
        rules.append(f"{num_shown:,} of {num_recorded:,} samples are shown, the first groups of each file")
    if is_cut:
        rules.append(f"longer messages are cut after {MOST_MESSAGE_CHARACTERS:,} characters and have no tokens")
    return "; ".join(rules) or None
