"""Make a prompt or an example from the columns of a row; errors name file, row, column and the value found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, cast

from lucidrl.data.config import DataConfig
from lucidrl.data.datasets import Example, Messages, Preference, Prompt, key_of
from lucidrl.data.interfaces import KEYS_OF_TOKENS, ChatMessage
from lucidrl.data.template import rendered
from lucidrl.errors import DataError

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_LONGEST_SHOWN = 60


class Columns:
    """Makes prompts and examples from rows, with the columns that the config names.

    Args:
        prefix: prepended to every id.
    """

    def __init__(self, config: DataConfig, prefix: str = "") -> None:
        self._config, self._prefix = config, prefix

    def is_selected(self, row: Mapping[str, Any], place: str) -> bool:
        """Whether the row has the values that `data.where` asks for."""
        for column, wanted in self._config.where.items():
            found = self._value(row, column, place, "data.where")
            if not any(_equals(found, value) for value in (wanted if isinstance(wanted, tuple) else (wanted,))):
                return False
        return True

    def prompt(self, row: dict[str, Any], place: str, row_id: str) -> Prompt:
        """Make the prompt of a row.

        Raises:
            DataError: a column is missing, or holds a value of the wrong type.
        """
        messages = self._opening(row, place)
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{place}: the last message has the role assistant; end the prompt with a message that the assistant "
                "replies to, or train on the whole conversation with lucidrl sft"
            )
        info = {column: value for column, value in row.items() if column not in _NOT_INFO}
        if self._config.answer is not None:
            info["answer"] = self._value(row, self._config.answer, place, "data.answer")
        stop_strings = row.get("stop_strings") or []
        if not isinstance(stop_strings, list) or not all(isinstance(text, str) and text for text in stop_strings):
            raise DataError(
                f"{place}: stop_strings={stop_strings!r} is not valid; it must be a list of non-empty strings"
            )
        return Prompt(self._id(row, place, row_id), messages, info, tuple(stop_strings), key_of(messages), place)

    def example(self, row: dict[str, Any], place: str, row_id: str) -> Example:
        """Make the example of a row: chat messages, a prompt and a completion, a ShareGPT or an Alpaca row.

        Raises:
            DataError: a column is missing, or holds a value of the wrong type.
        """
        completion = self._config.completion or "completion"
        if self._config.completion is not None or row.get(completion) is not None:
            written = self._value(row, completion, place, "data.completion")
            messages = (*self._opening(row, place), *_as_messages(written, "assistant", place, completion))
        elif self._config.prompt is None and self._config.template is None and (found := _of_other_layout(row, place)):
            messages = self._with_system(found)
        else:
            messages = self._opening(row, place)
        if messages[-1]["role"] != "assistant":
            raise DataError(
                f'{place}: needs "messages" that end with an assistant message, or "prompt" and "completion", but '
                f"has the columns {_listed(row)}; name the columns with data.prompt=... and data.completion=..."
            )
        return Example(f"{self._prefix}{row_id}", messages, key_of(messages), place)

    def preference(self, row: dict[str, Any], place: str, row_id: str) -> Preference:
        """Make the preference of a row: a pair, or a completion with a label.

        Raises:
            DataError: a column is missing, or holds a value of the wrong type.
        """
        config = self._config
        names = config.chosen or "chosen", config.rejected or "rejected", config.label or "label"
        is_labelled = config.label is not None or row.get(names[2]) is not None
        if not is_labelled or row.get(names[0]) is not None or row.get(names[1]) is not None:
            return self.pair(row, place, row_id)
        example = self.example(row, place, row_id)
        label = self._value(row, names[2], place, "data.label")
        if not any(_equals(label, value) for value in (True, False)):
            raise DataError(f"{place}: column {names[2]!r} holds {_shown(label)}; it must hold true or false")
        prompt, completion = example.messages[:-1], example.messages[-1:]
        chosen, rejected = (completion, None) if _equals(label, True) else (None, completion)
        return Preference(example.example_id, prompt, chosen, rejected, key_of(prompt), place)

    def pair(self, row: dict[str, Any], place: str, row_id: str) -> Preference:
        """Make the pair of a row: a prompt with two completions, or two conversations with the same beginning.

        Raises:
            DataError: a column is missing, holds a value of the wrong type, or both completions are equal.
        """
        chosen, rejected = (
            _as_messages(self._value(row, name, place, f"data.{key}"), "assistant", place, name)
            for key, name in (
                ("chosen", self._config.chosen or "chosen"),
                ("rejected", self._config.rejected or "rejected"),
            )
        )
        if chosen == rejected:
            raise DataError(f"{place}: chosen and rejected are equal, so neither is better; remove the row")
        if chosen[0]["role"] == "assistant" and rejected[0]["role"] == "assistant":
            prompt = self._opening(row, place, ("prompt",))
        else:
            prompt, chosen, rejected = self._split(chosen, rejected, place)
        for name, completion in (("chosen", chosen), ("rejected", rejected)):
            if not completion or completion[0]["role"] != "assistant" or completion[-1]["role"] != "assistant":
                raise DataError(
                    f"{place}: {name} must begin with the assistant message after the common prompt and end with an "
                    "assistant message; correct the roles, or remove the row"
                )
        if prompt[-1]["role"] == "assistant":
            raise DataError(f"{place}: the prompt ends with an assistant message; end it with one that is replied to")
        return Preference(f"{self._prefix}{row_id}", prompt, chosen, rejected, key_of(prompt), place)

    def _split(self, chosen: Messages, rejected: Messages, place: str) -> tuple[Messages, Messages, Messages]:
        """Return the common prompt of two conversations, and the rest of each."""
        config = self._config
        if config.prompt is not None or config.template is not None:
            key = "prompt" if config.prompt is not None else "template"
            raise DataError(
                f"{place}: data.{key} would have no effect, because chosen and rejected are whole conversations; "
                "remove the setting"
            )
        pairs = enumerate(zip(chosen, rejected, strict=False))
        length = next((index for index, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
        if not length:
            raise DataError(
                f"{place}: chosen and rejected are conversations that begin with different messages; begin both with "
                "the same prompt"
            )
        return self._with_system(chosen[:length]), chosen[length:], rejected[length:]

    def _opening(
        self, row: Mapping[str, Any], place: str, names: tuple[str, ...] = ("prompt", "messages")
    ) -> tuple[ChatMessage, ...]:
        """Messages of the prompt, with the system prompt."""
        config = self._config
        if config.template is not None:
            text = rendered(config.template, row, place)
            return self._with_system(({"role": "user", "content": text},))
        column = config.prompt
        if column is None:
            found = [name for name in names if row.get(name) is not None]
            if len(found) != 1:
                either = " or ".join(f'"{name}"' for name in names)
                raise DataError(
                    f"{place}: has the columns {_listed(row)}; give {'either ' if len(names) > 1 else ''}{either}, or "
                    "name the column of the prompt with data.prompt=..."
                )
            column = found[0]
        content = self._value(row, column, place, "data.prompt")
        return self._with_system(_as_messages(content, "user", place, column))

    def _with_system(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        text = self._config.system_prompt
        if text is None or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": text}, *messages)

    def _id(self, row: Mapping[str, Any], place: str, row_id: str) -> str:
        own = row.get("id", row_id)
        if not isinstance(own, str | int):
            raise DataError(f"{place}: id {own!r} is not valid; it must be a string or an integer")
        return f"{self._prefix}{own}"

    def _value(self, row: Mapping[str, Any], column: str, place: str, setting: str) -> Any:
        if column not in row:
            raise DataError(f"{place}: has no column {column!r} ({setting}); it has {_listed(row)}")
        return row[column]


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?\d+(\.0*)?", re.ASCII)
_NOT_INFO = frozenset({"id", "prompt", "messages", "stop_strings"})


def _as_messages(content: Any, role: str, place: str, column: str) -> tuple[ChatMessage, ...]:
    """Return a string as one message with this role; a list is checked and returned as messages."""
    if isinstance(content, str):
        return ({"role": role, "content": content},)
    if not isinstance(content, list):
        raise DataError(
            f"{place}: column {column!r} holds {_shown(content)}; it must hold a string or a list of chat messages in "
            "every row"
        )
    if not content:
        raise DataError(f"{place}: column {column!r} holds an empty list; give at least one message")
    return tuple(_message(message, place, column) for message in content)


def _message(message: Any, place: str, column: str) -> ChatMessage:
    """Check a message, and keep all its keys for the chat template.

    Keys with the value None are dropped, because Arrow gives every message the keys of all. A message that calls tools
    may have no content.
    """
    kept = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if kept.get("tool_calls"):
        kept.setdefault("content", "")
    if not isinstance(kept.get("role"), str) or not isinstance(kept.get("content"), str):
        raise DataError(
            f"{place}: column {column!r} holds the message {_shown(message)}, which is not valid; it must be "
            '{"role": "...", "content": "..."}'
        )
    calls = kept.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{place}: column {column!r}: tool_calls holds {_shown(calls)}; it must hold a list of objects")
    for key in ("name", "tool_call_id"):
        if not isinstance(kept.get(key, ""), str):
            raise DataError(f"{place}: column {column!r}: {key} holds {_shown(kept[key])}; it must hold a string")
    if reserved := [key for key in KEYS_OF_TOKENS if key in kept]:
        raise DataError(f"{place}: column {column!r}: a message has the reserved key {reserved[0]}; rename it")
    return cast(ChatMessage, kept)


def _of_other_layout(row: Mapping[str, Any], place: str) -> tuple[ChatMessage, ...]:
    """Messages of a ShareGPT row (`conversations`) or an Alpaca row (`instruction`, `input`, `output`); else ()."""
    if isinstance(turns := row.get("conversations"), list):
        return tuple(_turn(turn, place) for turn in turns)
    if not isinstance(row.get("instruction"), str) or "output" not in row:
        return ()
    texts = {name: row.get(name) or "" for name in ("instruction", "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{place}: column {name!r} holds {_shown(text)}; it must hold a string")
    question = texts["instruction"] + (f"\n\n{texts['input']}" if texts["input"] else "")
    return ({"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]})


def _turn(turn: Any, place: str) -> ChatMessage:
    role = SHAREGPT_ROLES.get(turn.get("from", "")) if isinstance(turn, dict) else None
    if role is None or not isinstance(turn.get("value"), str):
        known = ", ".join(SHAREGPT_ROLES)
        raise DataError(
            f"{place}: column 'conversations' holds {_shown(turn)}; each entry must be {{\"from\": one of {known}, "
            '"value": "..."}'
        )
    return {"role": role, "content": turn["value"]}


def _equals(found: Any, wanted: Any) -> bool:
    """Whether a cell has the wanted value; a string, as in CSV files, is read as a value of the wanted type."""
    if not isinstance(found, str) or isinstance(wanted, str):
        return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)
    text = found.strip()
    if wanted is None:
        return not text
    if isinstance(wanted, bool):
        return text.lower() == str(wanted).lower()
    if isinstance(wanted, int) and _INTEGER.fullmatch(text):
        return Decimal(text) == wanted  # exact, unlike float, and without a limit of digits, unlike int
    return _NUMBER.fullmatch(text) is not None and float(text) == wanted


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    return f"a {type(value).__name__} ({text})" if value is not None else "nothing (null)"


def _listed(row: Mapping[str, Any]) -> str:
    names = ", ".join(map(str, row)) or "(none)"
    return names if len(names) <= 500 else f"{names[:500]}..."
