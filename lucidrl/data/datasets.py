"""Prompts, which the model completes, and examples, which it learns in supervised fine-tuning."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from lucidrl.data.interfaces import ChatMessage
from lucidrl.errors import DataError


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
    """Prompts with equal keys are all in training or all in validation; by default the prompt's id is the key."""
    place: str | None = None
    """File and row that the prompt was read from, if any."""

    @property
    def label(self) -> str:
        """How errors name the prompt."""
        return f"prompt {self.prompt_id!r}" + (f" ({self.place})" if self.place else "")

    @property
    def key(self) -> str:
        """The split key: `split_key`, or the id."""
        return self.split_key or self.prompt_id


@dataclass(frozen=True)
class Example:
    """Messages to learn from; the last one is an assistant message."""

    example_id: str
    messages: tuple[ChatMessage, ...]
    key: str
    """Split key: examples with equal keys are all in training or all in validation."""
    place: str | None = None
    """File and row that the example was read from, if any."""

    @property
    def label(self) -> str:
        """How errors name the example."""
        return f"example {self.messages[0]['content'][:40]!r}" + (f" ({self.place})" if self.place else "")


@contextmanager
def naming(item: Prompt | Example) -> Iterator[None]:
    """Context manager: prefix the message of a DataError raised inside it with the label of the prompt or example."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{item.label}: {error}") from error


def key_of(messages: Sequence[ChatMessage]) -> str:
    """A hash of the messages, used as split key."""
    return hashlib.sha256(orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)).hexdigest()


def example_of(prompt: Prompt) -> Example:
    """Make an example from a prompt and the `answer` in its `info`."""
    if "answer" not in prompt.info:
        raise DataError(
            f"prompt {prompt.prompt_id!r} has no answer in its info, so SFT cannot learn from it; set "
            "data.file=... to a file of examples"
        )
    answer: ChatMessage = {"role": "assistant", "content": str(prompt.info["answer"])}
    return Example(prompt.prompt_id, (*prompt.messages, answer), prompt.key, prompt.place)


def is_held_out(key: str, fraction: float) -> bool:
    """Whether a split key is held out for validation; the result is the same on every machine and in every run.

    A larger `fraction` holds out the same keys and more.
    """
    digest = hashlib.sha256(f"\0{key}".encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64
