"""Written conversations to learn from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lucidrl.data.datasets import Prompt, is_held_out
from lucidrl.data.interfaces import ChatMessage
from lucidrl.data.jsonl import read_json_lines
from lucidrl.errors import DataError

Example = list[ChatMessage]


def load_examples(path: Path, validation_fraction: float) -> tuple[list[Example], list[Example]]:
    """Training and held-out conversations of a JSONL file.

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
        raise DataError(f"example file {path} has no conversations to train on; write one JSON object on each line")
    return train, held_out


def answered(prompt: Prompt) -> Example:
    """A prompt followed by the `answer` of its info."""
    if "answer" not in prompt.info:
        raise DataError(
            f"prompt {prompt.prompt_id!r} has no answer in its info, so there is nothing to learn from it; "
            "give data.file=... with written conversations"
        )
    return [*prompt.messages, {"role": "assistant", "content": str(prompt.info["answer"])}]


def _example(record: dict[str, Any], place: str) -> Example:
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["completion"]}]
    messages = record.get("messages")
    is_list_of_messages = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not is_list_of_messages or not messages or messages[-1]["role"] != "assistant":
        raise DataError(
            f'{place}: needs "messages" (each with role and content, the last of the assistant), '
            'or "prompt" and "completion"'
        )
    return messages
