"""Prompts to complete and examples to learn from."""

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
    """Prompts with equal keys are on the same side of a split; by default the prompt's id."""
    place: str | None = None
    """File and row that it was read from, if any."""

    @property
    def label(self) -> str:
        """How errors name it."""
        return f"prompt {self.prompt_id!r}" + (f" ({self.place})" if self.place else "")

    @property
    def key(self) -> str:
        """The split key."""
        return self.split_key or self.prompt_id


@dataclass(frozen=True)
class Example:
    """Messages to learn from; the last one is of the assistant."""

    example_id: str
    messages: tuple[ChatMessage, ...]
    key: str
    """Examples with equal keys are on the same side of a split."""
    place: str | None = None
    """File and row that it was read from, if any."""

    @property
    def label(self) -> str:
        """How errors name it."""
        return f"example {self.messages[0]['content'][:40]!r}" + (f" ({self.place})" if self.place else "")


@contextmanager
def naming(item: Prompt | Example) -> Iterator[None]:
    """Name the prompt or example in errors of its data, such as one that the chat template refuses."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{item.label}: {error}") from error


def key_of(messages: Sequence[ChatMessage]) -> str:
    """The split key of messages."""
    return hashlib.sha256(orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)).hexdigest()


def example_of(prompt: Prompt) -> Example:
    """A prompt, completed by the `answer` of its info."""
    if "answer" not in prompt.info:
        raise DataError(
            f"prompt {prompt.prompt_id!r} has no answer in its info to learn from; give data.file=... with examples"
        )
    answer: ChatMessage = {"role": "assistant", "content": str(prompt.info["answer"])}
    return Example(prompt.prompt_id, (*prompt.messages, answer), prompt.key, prompt.place)


def is_held_out(key: str, fraction: float) -> bool:
    """Whether a split key belongs to the held-out `fraction`; the same on every machine and in every run.

    A larger fraction only adds keys.
    """
    digest = hashlib.sha256(f"\0{key}".encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64
