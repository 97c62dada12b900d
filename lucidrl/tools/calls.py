"""Read the tool calls of a completion.

A completion calls tools in one of two forms. The first is the plain format, which many models write anyway:

    <tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>

The second is a completion that consists of JSON only: one such object, or a list of them. In both, `parameters` may
replace `arguments`. Calls in the reasoning at the start of a completion, up to `</think>`, do not count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lucidrl.data.tools import CALL_END, CALL_START

_LONGEST_CALL = 100_000
"""Most characters of one call."""
_DEEPEST = 50
"""Most levels of nested lists and objects in a call."""
_LONGEST_NAME = 100
_TOO_DEEP = f"the tool call is nested too deeply; at most {_DEEPEST} levels are allowed"
_REASONING_START, _REASONING_END = "<think>", "</think>"


@dataclass(frozen=True)
class ToolCall:
    """A call that can be executed if the tool exists and accepts the arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BadCall:
    """Text that tries to call a tool and cannot be read."""

    problem: str
    """A sentence without its period."""


def calls_of(completion: str) -> list[ToolCall | BadCall]:
    """Return the calls in their order; empty if the completion calls no tool."""
    text = _without_reasoning(completion)
    if CALL_START in text:
        _, *parts = text.split(CALL_START)
        return [_call_of(part.partition(CALL_END)[0]) for part in parts]
    return _calls_of_json(text.strip())


def _without_reasoning(text: str) -> str:
    """Remove reasoning from the start; its first tag may be part of the prompt."""
    before, end, rest = text.partition(_REASONING_END)
    if text.lstrip().startswith(_REASONING_START):
        return rest
    return rest if end and _REASONING_START not in before else text


def _calls_of_json(text: str) -> list[ToolCall | BadCall]:
    """Calls of a completion that is JSON as a whole; any other JSON is an answer, not a call."""
    if not text.startswith(("{", "[")) or len(text) > _LONGEST_CALL:
        return []
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = content if isinstance(content, list) else [content]
    if _is_too_deep(content):
        return [BadCall(_TOO_DEEP)]
    if not entries or not all(_is_call(entry) for entry in entries):
        return []
    return [_read(entry) for entry in entries]


def _call_of(text: str) -> ToolCall | BadCall:
    if len(text) > _LONGEST_CALL:
        return BadCall(f"the tool call has {len(text):,} characters; at most {_LONGEST_CALL:,} are allowed")
    try:
        content = json.loads(text)
    except RecursionError:
        return BadCall(_TOO_DEEP)
    except ValueError as error:
        return BadCall(f"the tool call is not valid JSON ({error})")
    return BadCall(_TOO_DEEP) if _is_too_deep(content) else _read(content)


def _read(content: Any) -> ToolCall | BadCall:
    if not _is_call(content):
        return BadCall('a tool call must be {"name": ..., "arguments": {...}}')
    function = content.get("function", content)
    name = function["name"][:_LONGEST_NAME]
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI's interface writes them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return BadCall(f"the arguments of the call of {name!r} are not valid JSON")
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of the call of {name!r} must be an object")
    if _is_too_deep(arguments):
        return BadCall(_TOO_DEEP)
    return ToolCall(function["name"], arguments)


def _is_call(content: Any) -> bool:
    function = content.get("function", content) if isinstance(content, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return "arguments" in function or "parameters" in function


def _is_too_deep(content: Any) -> bool:
    level = [content]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
        if not level:
            return False
    return True
