"""Prompts, which the model completes, examples, which it learns, and preferences between completions."""

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


Messages = tuple[ChatMessage, ...]


@dataclass(frozen=True)
class Preference:
    """A prompt with a chosen and a rejected completion, or with only one of them."""

    example_id: str
    prompt: Messages
    chosen: Messages | None
    rejected: Messages | None
    key: str
    """Split key: preferences with equal keys are all in training or all in validation."""
    place: str | None = None
    """File and row that the preference was read from, if any."""

    @property
    def label(self) -> str:
        """How errors name the preference."""
        return f"preference {self.prompt[0]['content'][:40]!r}" + (f" ({self.place})" if self.place else "")

    @property
    def messages(self) -> Messages:
        """The prompt."""
        return self.prompt


@contextmanager
def naming(item: Prompt | Example | Preference) -> Iterator[None]:
    """Context manager: prefix the message of a DataError raised inside it with the label of the item."""
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
            f"prompt {prompt.prompt_id!r} has no answer in its info, so there is no completion to learn; set "
            "data.file=... to a file"
        )
    answer: ChatMessage = {"role": "assistant", "content": str(prompt.info["answer"])}
    return Example(prompt.prompt_id, (*prompt.messages, answer), prompt.key, prompt.place)


def preferences_of(prompts: Sequence[Prompt]) -> dict[str, Preference]:
    """Make a preference of every prompt: its `answer` over the answer of the next prompt that has another one.

    Returns:
        The preferences by prompt id.
    """
    answers = [example_of(prompt).messages[-1] for prompt in prompts]
    found = {}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        others = (answers[(number + step) % len(answers)] for step in range(1, len(answers)))
        other = next((other for other in others if other != answer), None)
        if other is None:
            raise DataError(
                f"all {len(prompts)} prompts have the same answer, so there is none to reject; set data.file=... to a "
                "file of preferences"
            )
        found[prompt.prompt_id] = Preference(
            prompt.prompt_id, prompt.messages, (answer,), (other,), prompt.key, prompt.place
        )
    return found


def is_held_out(key: str, fraction: float) -> bool:
    """Whether a split key is held out for validation; the result is the same on every machine and in every run.

    A larger `fraction` holds out the same keys and more.
    """
    digest = hashlib.sha256(f"\0{key}".encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * 2**64
