"""Tools as functions: find them by name, describe them to the model, and call them in a pool of processes.

This module does not import torch, because the processes of the pool import it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
from pydantic import ValidationError, validate_call

from lucidrl.data.reading import ParseFailure
from lucidrl.errors import ConfigError
from lucidrl.rewards.interfaces import Completion, Limits, Text
from lucidrl.tools.builtin import calculator, python_tool
from lucidrl.tools.config import ToolConfig
from lucidrl.utils.imports import import_user_module
from lucidrl.utils.suggestions import closest

Function = Callable[..., Any]

BUILTIN: dict[str, Callable[[Limits], Function]] = {
    "calculator": lambda limits: calculator,
    "python": python_tool,
}
_MOST_PROBLEMS = 3


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    """Name in calls and metrics."""
    schema: dict[str, Any]
    """Description for the model, as JSON schema."""
    config: ToolConfig
    make: Callable[[], Function]
    """Makes the function; picklable, because the processes of the pool call it."""


def load_tools(tools: Sequence[ToolConfig | Function]) -> list[Tool]:
    """Import tools by name, and describe them and functions that are passed as objects.

    Raises:
        ConfigError: a tool does not exist, its signature or docstring does not describe it, or two have the same name.
    """
    found = [_named(tool) if isinstance(tool, ToolConfig) else _object(tool) for tool in tools]
    names = [tool.name for tool in found]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two tools have the name {repeated}; rename one of the functions")
    return found


def schemas_of(tools: Sequence[ToolConfig | Function]) -> list[dict[str, Any]]:
    """Descriptions of the tools for the model; see `load_tools` for the errors."""
    return [tool.schema for tool in load_tools(tools)]


def _named(config: ToolConfig) -> Tool:
    make = partial(function_of, config)
    function = make()
    return Tool(function.__name__, describe(function), config, make)


def _object(function: Function) -> Tool:
    if not callable(function):
        raise ConfigError(f"tools has {function!r}; pass functions, or names such as 'calculator'")
    schema = describe(function)
    name = schema["function"]["name"]
    try:
        make = partial(cloudpickle.loads, cloudpickle.dumps(function))
    except Exception as error:  # __reduce__ of an object that the function uses may raise anything
        raise ConfigError(
            f"tool {name} cannot be sent to its processes ({type(error).__name__}: {error}); create such objects "
            "inside the function"
        ) from error
    return Tool(name, schema, ToolConfig(name=name), make)


def function_of(config: ToolConfig) -> Function:
    """Return the function of a tool by its name or import path.

    Raises:
        ConfigError: there is no such tool or function.
    """
    if config.name in BUILTIN:
        return BUILTIN[config.name](config.limits)
    module_name, colon, name = config.name.partition(":")
    if not (module_name and colon and name):
        meant = closest(config.name, BUILTIN)
        hint = f"did you mean {meant}?" if meant else f"use {', '.join(BUILTIN)}, or your function as module:function"
        raise ConfigError(f"unknown tool {config.name!r}; {hint}")
    module = import_user_module(module_name, "the tool")
    function = getattr(module, name, None)
    if not callable(function) or isinstance(function, type):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"module {module_name} has no function {name}; it defines {', '.join(own) or 'nothing'}")
    return function


def describe(function: Function) -> dict[str, Any]:
    """Return the JSON schema of a function, from its signature and docstring.

    Raises:
        ConfigError: a type hint or a description is missing.
    """
    from transformers.utils import get_json_schema

    name = getattr(function, "__name__", type(function).__name__)
    _check_kind(name, function)
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # several kinds, for hints and docstrings
        raise ConfigError(
            f"tool {name} cannot be described to the model: {error}; give every parameter a type hint, and a line "
            "below `Args:` in the docstring"
        ) from error
    schema["function"].pop("return", None)  # templates do not show it
    return schema


def _check_kind(name: str, function: Function) -> None:
    """Raise ConfigError for functions that a call with named arguments does not run to its end."""
    kinds = {
        "a coroutine": inspect.iscoroutinefunction,
        "an asynchronous generator": inspect.isasyncgenfunction,
        "a generator": inspect.isgeneratorfunction,
    }
    if kind := next((kind for kind, is_one in kinds.items() if is_one(function)), None):
        raise ConfigError(f"tool {name} is {kind}, which cannot be called as a tool; return the result from a function")
    parameters = inspect.signature(function).parameters.values()
    if unnamed := [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]:
        raise ConfigError(
            f"tool {name} takes {', '.join(unnamed)} by position only, but calls name their arguments; remove the / "
            "from its parameters"
        )


class ToolRunner:
    """Calls a tool in a process of the pool; the item's text holds the arguments as JSON."""

    def __init__(self, make: Callable[[], Function], max_result_chars: int) -> None:
        self._function = validate_call(make())
        self._max_chars = max_result_chars

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> Text:
        """Return the result as text.

        Raises:
            ParseFailure: the function does not accept the arguments.
            Exception: the function raised it.
        """
        arguments = json.loads(completion.text)
        try:
            result = self._function(**arguments)
        except ValidationError as error:
            if error.title != self._function.__name__:  # raised inside the function
                raise
            raise ParseFailure(_problems_of(error)) from error
        return Text(self._shortened(result if isinstance(result, str) else _as_json(result)))

    def _shortened(self, text: str) -> str:
        if len(text) <= self._max_chars:
            return text
        return f"{text[: self._max_chars]} ... (cut: {len(text):,} characters, {self._max_chars:,} shown)"


def _problems_of(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in found[:_MOST_PROBLEMS]]
    more = f" and {len(found) - _MOST_PROBLEMS} more" if len(found) > _MOST_PROBLEMS else ""
    return "; ".join(shown) + more


def _as_json(result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
