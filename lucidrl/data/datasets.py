"""Prompts and supervised examples: read from files, split into training and validation, ordered reproducibly."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from lucidrl.data.interfaces import ChatMessage
from lucidrl.data.jsonl import read_json_lines
from lucidrl.errors import ConfigError, DataError

Example = list[ChatMessage]
"""Messages to learn from; the last one is of the assistant."""


@dataclass(frozen=True)
class Prompt:
    """Messages for the model to complete."""

    prompt_id: str
    messages: tuple[ChatMessage, ...]
    info: dict[str, Any] = field(default_factory=dict)
    """What the environment needs to score a completion, such as `{"answer": "42"}`."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion of this prompt, beside the configured ones."""
    split_key: str | None = None
    """Prompts with equal keys are on the same side of a split; by default the prompt's id."""


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts from a JSONL file.

    A line is `{"prompt": "text"}` or `{"messages": [{"role": ..., "content": ...}, ...]}`, with an optional `"id"`
    (by default the file's name and line) and `"stop_strings"`; every other key goes to `info`. Lines with equal
    messages share a split key.

    Raises:
        DataError: naming file and line, for a missing or empty file, one that is not JSONL, a malformed line or an id
            used twice.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    line_of_id: dict[str, int] = {}
    for line in read_json_lines(path, "prompt"):
        prompt = _prompt(line.record, line.place, default_id=f"{path.stem}:{line.number}")
        first = line_of_id.setdefault(prompt.prompt_id, line.number)
        if first != line.number:
            raise DataError(f"{line.place}: line {first} has id {prompt.prompt_id!r} too; make ids unique")
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"prompt file {path} has no prompts; write one JSON object per line")
    return prompts


def load_examples(path: Path, validation_fraction: float) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples of a JSONL file.

    A line is `{"messages": [...]}` ending in an assistant message, or `{"prompt": "...", "completion": "..."}`.

    Raises:
        DataError: naming file and line, for a missing or empty file or a malformed line.
    """
    train: list[Example] = []
    held_out: list[Example] = []
    for line in read_json_lines(path, "example"):
        fingerprint = hashlib.sha256(line.content).hexdigest()
        side = held_out if is_held_out(fingerprint, validation_fraction) else train
        side.append(_example(line.record, line.place))
    if not train:
        raise DataError(f"example file {path} has no examples to train on; write one JSON object per line")
    return train, held_out


def example_of(prompt: Prompt) -> Example:
    """A prompt, completed by the `answer` of its info."""
    if "answer" not in prompt.info:
        raise DataError(
            f"prompt {prompt.prompt_id!r} has no answer in its info to learn from; give data.file=... with examples"
        )
    return [*prompt.messages, {"role": "assistant", "content": str(prompt.info["answer"])}]


def is_held_out(prompt_id: str, fraction: float) -> bool:
    """Whether an id belongs to the held-out `fraction`; the same on every machine and in every run.

    A larger fraction only adds ids.
    """
    digest = hashlib.sha256(f"\0{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64


def split(prompts: Sequence[Prompt], validation_fraction: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split into (training, validation) by split key; a fraction of 0 leaves validation empty."""
    if not 0 <= validation_fraction < 1:
        raise ConfigError(f"validation_fraction={validation_fraction} is not valid; it must be at least 0 and below 1")
    training: list[Prompt] = []
    validation: list[Prompt] = []
    for prompt in prompts:
        held_out = is_held_out(prompt.split_key or prompt.prompt_id, validation_fraction)
        (validation if held_out else training).append(prompt)
    if validation_fraction > 0 and not (training and validation):
        raise DataError(
            f"env.validation_fraction={validation_fraction} splits {len(prompts)} prompts into {len(training)} for "
            f"training and {len(validation)} for validation; give more prompts, or set the fraction to 0"
        )
    return training, validation


class PromptOrder:
    """The endless order of prompts: each epoch is a new shuffle of all prompts.

    It is a pure function of seed and position, so a checkpoint only stores the position.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        if num_prompts < 1:
            raise DataError(f"num_prompts={num_prompts} is not positive; give at least one prompt")
        self._num_prompts = num_prompts
        self._seed = seed
        self._epoch = -1
        self._shuffled: list[int] = []

    def take(self, start: int, count: int) -> list[int]:
        """Indices of the prompts at positions `start` to `start + count` (excluded), counted from 0."""
        if start < 0 or count < 0:
            raise ValueError(f"start={start} and count={count} must not be negative")
        return [self._at(position) for position in range(start, start + count)]

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self._num_prompts)
        if epoch != self._epoch:
            self._epoch, self._shuffled = epoch, self._shuffle(epoch)
        return self._shuffled[offset]

    def _shuffle(self, epoch: int) -> list[int]:
        # Sorted by hash: random generators may change their shuffles between library versions.
        def key(index: int) -> bytes:
            return hashlib.sha256(f"{self._seed}/{epoch}/{index}".encode()).digest()

        return sorted(range(self._num_prompts), key=key)


def _prompt(record: dict[str, Any], place: str, default_id: str) -> Prompt:
    if ("prompt" in record) == ("messages" in record):
        raise DataError(f'{place}: has the keys {", ".join(record) or "(none)"}; give either "prompt" or "messages"')
    prompt_id = record.pop("id", default_id)
    if not isinstance(prompt_id, str | int):
        raise DataError(f"{place}: id {prompt_id!r} is not valid; it must be a string or an integer")
    if "prompt" in record:
        messages = _parse_messages([{"role": "user", "content": record.pop("prompt")}], place)
    else:
        messages = _parse_messages(record.pop("messages"), place)
    split_key = hashlib.sha256(orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)).hexdigest()
    stop_strings = record.pop("stop_strings", [])
    if not isinstance(stop_strings, list) or not all(isinstance(text, str) and text for text in stop_strings):
        raise DataError(f"{place}: stop_strings={stop_strings!r} is not valid; it must be a list of texts")
    return Prompt(str(prompt_id), messages, record, tuple(stop_strings), split_key)


def _parse_messages(content: Any, place: str) -> tuple[ChatMessage, ...]:
    if not isinstance(content, list) or not content:
        raise DataError(f"{place}: messages={content!r} is not valid; it must be a list of at least one message")
    for message in content:
        if not _is_message(message) or len(message) > 2:
            raise DataError(f'{place}: message {message!r} is not valid; it must be {{"role": text, "content": text}}')
    return tuple(content)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _example(record: dict[str, Any], place: str) -> Example:
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["completion"]}]
    messages = record.get("messages")
    are_messages = isinstance(messages, list) and all(map(_is_message, messages))
    if not are_messages or not messages or messages[-1]["role"] != "assistant":
        raise DataError(
            f'{place}: needs "messages" (each with role and content, the last of the assistant), '
            'or "prompt" and "completion"'
        )
    return messages
