"""Reward functions: plain Python functions whose parameters are filled by name from the columns of a row."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import re
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lucidrl.envs.text.interfaces import EnvRequest, SampleFailure
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.utils.imports import import_user_module
from lucidrl.utils.suggestions import check_arguments

F = TypeVar("F", bound=Callable[..., Any])

Score = float | SampleFailure | None
"""Result of a reward function for one sample; None if the function does not apply to the sample."""

_OPTIONS = "_lucidrl_reward_options"
_OF_SAMPLE = ("completion", "prompt", "messages", "completion_tokens")
_OF_BATCH = (*_OF_SAMPLE, "completions", "prompts", "completion_ids")
_NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_WITHOUT = object()


@dataclass(frozen=True)
class _Options:
    per: Literal["sample", "batch"]
    chat: bool | None


def reward_function(per: Literal["sample", "batch"] = "sample", *, chat: bool | None = None) -> Callable[[F], F]:
    """Decorator: set how a reward function is called. A function without this decorator is called once per sample.

    A function with a parameter `completions` is called once per batch even without this decorator.

    Args:
        per: call the function once per `sample` or once per `batch`. Per batch, every argument is a list with one entry
            per completion, and so is the result.
        chat: whether each entry of `completions` and `prompts` is a list of messages (True) or a string (False);
            default: a list if the prompt has several messages, or its row has a list of messages.

    Example:
        @reward_function(per="batch")
        def longest(completion, **row):
            most = max(map(len, completion))
            return [float(len(text) == most) for text in completion]
    """
    if per not in ("sample", "batch"):
        raise ConfigError(f"reward_function(per={per!r}) is not valid; use per='sample' or per='batch'")

    def mark(function: F) -> F:
        setattr(function, _OPTIONS, _Options(per, chat))
        return function

    return mark


class RewardFunction:
    """A reward function, sync or async, per sample or per batch.

    Args:
        function: any callable.
        name: name in metrics and errors; by default the name of the function.
        kwargs: values for parameters; they take precedence over columns of the same name.

    Raises:
        ConfigError: if the function is not callable, or has no parameter for a value in `kwargs`.
    """

    def __init__(
        self, function: Callable[..., Any], name: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name or function_name(function)
        if not callable(function):
            raise ConfigError(f"reward {self.name} is a {type(function).__name__}; give a function")
        self._function = function
        self._kwargs = dict(kwargs or {})
        check_arguments(function, self._kwargs, "reward.kwargs")
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the parameters of reward {self.name} cannot be read: {error}; wrap it in a function with def"
            ) from error
        if unnamed := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]:
            problem = f"reward {self.name} takes {', '.join(unnamed)} by position only"
            raise ConfigError(f"{problem}, but columns are passed by name; remove the / from its parameters")
        self._named = {p.name: p for p in parameters if p.kind in _NAMED_KINDS}
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        default = _Options("batch" if "completions" in self._named else "sample", None)
        self._options: _Options = getattr(function, _OPTIONS, default)

    @property
    def is_per_batch(self) -> bool:
        return self._options.per == "batch"

    def check(self, columns: Collection[str]) -> None:
        """Raise ConfigError if a parameter without a default has no column."""
        if missing := self._missing(columns):
            raise ConfigError(f"{self._complaint(missing, columns)}; rename the parameter, or give it a default")

    async def score(self, batch: Sequence[EnvRequest]) -> list[Score]:
        """Score the samples of a batch, in their order.

        Raises:
            EnvironmentFailure: if the function raises an EnvironmentFailure.
        """
        if self.is_per_batch:
            return await self._score_batch(batch)
        scores: list[Score | Awaitable[Score]] = []
        for request in batch:
            scores.append(self._score_sample(request))
            await asyncio.sleep(0)  # let other calls run between two samples
        waiting = [score for score in scores if not isinstance(score, Score)]
        arrived = iter(await asyncio.gather(*waiting))
        return [score if isinstance(score, Score) else next(arrived) for score in scores]

    def _score_sample(self, request: EnvRequest) -> Score | Awaitable[Score]:
        """Return the score, or an awaitable that returns it."""
        if missing := self._missing(request.info):
            return SampleFailure(self._complaint(missing, request.info))
        try:
            value = self._function(**self._arguments(sample_values(request), request.info))
        except BaseException as error:  # SystemExit would stop the event loop
            return self._raised(error)
        if not inspect.isawaitable(value):
            return self._checked(value)
        return self._awaited(value)

    async def _awaited(self, value: Awaitable[Any]) -> Score:
        try:
            return self._checked(await value)
        except asyncio.CancelledError:  # the call timed out
            raise
        except BaseException as error:
            return self._raised(error)

    async def _score_batch(self, batch: Sequence[EnvRequest]) -> list[Score]:
        names = dict.fromkeys(name for request in batch for name in request.info)
        columns = {name: [request.info.get(name) for request in batch] for name in names}
        if missing := self._missing(columns):
            return [SampleFailure(self._complaint(missing, columns), is_of_call=True)] * len(batch)
        try:
            values = self._function(**self._arguments(self._batch_values(batch), columns))
            if inspect.isawaitable(values):
                values = await values
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return [self._raised(error, is_of_call=True)] * len(batch)
        if hasattr(values, "tolist"):  # an array or a tensor
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(batch):
            is_list = isinstance(values, Sequence) and not isinstance(values, str)
            got = f"{len(values)} rewards" if is_list else f"a {type(values).__name__}"
            rule = "instead of a list with one number or None per completion"
            failure = SampleFailure(
                f"reward {self.name} returned {got} for {len(batch)} completions {rule}", is_of_call=True
            )
            return [failure] * len(batch)
        return [self._checked(value) for value in values]

    def _batch_values(self, batch: Sequence[EnvRequest]) -> dict[str, list[Any]]:
        values = {name: [sample_values(request)[name] for request in batch] for name in _OF_SAMPLE}
        values["completion_ids"] = [_token_ids(request) for request in batch]
        chat = self._options.chat
        are_chats = [_is_chat(request) if chat is None else chat for request in batch]
        values["completions"] = [
            [{"role": "assistant", "content": text}] if is_chat else text
            for text, is_chat in zip(values["completion"], are_chats, strict=True)
        ]
        values["prompts"] = [
            messages if is_chat else text
            for messages, text, is_chat in zip(values["messages"], values["prompt"], are_chats, strict=True)
        ]
        return values

    def _arguments(self, values: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        filled = {**columns, **values, **self._kwargs}
        arguments = {name: filled[name] for name in self._named if name in filled}
        if self._takes_all:
            arguments |= {name: value for name, value in columns.items() if name not in values}
            if "completions" in self._named:  # as TRL passes them
                arguments |= {name: values[name] for name in ("completions", "prompts", "completion_ids")}
            arguments |= self._kwargs
        return arguments

    def _missing(self, columns: Collection[str]) -> list[str]:
        known = {*(_OF_BATCH if self.is_per_batch else _OF_SAMPLE), *self._kwargs}
        required = [name for name, parameter in self._named.items() if parameter.default is parameter.empty]
        return [name for name in required if name not in known and name not in columns]

    def _complaint(self, missing: Sequence[str], columns: Collection[str]) -> str:
        noun = "parameter" if len(missing) == 1 else "parameters"
        found = ", ".join(map(str, columns)) or "none beside the prompt"
        known = ", ".join(_OF_SAMPLE)
        return f"reward {self.name} has the {noun} {', '.join(missing)}, but the columns are {found} (and {known})"

    def _checked(self, value: Any) -> Score:
        if value is None:
            return None
        if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch
            value = value.item()
        if not isinstance(value, numbers.Real):
            return SampleFailure(f"reward {self.name} returned a {type(value).__name__} instead of a number or None")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            return SampleFailure(f"reward {self.name} returned {number} instead of a finite number or None")
        return number

    def _raised(self, error: BaseException, is_of_call: bool = False) -> SampleFailure:
        if isinstance(error, EnvironmentFailure):
            raise error
        summary = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
        return SampleFailure(f"reward {self.name} raised {summary}", is_of_call=is_of_call, trace=trace)


def import_reward(path: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """Import the reward function `module:name`; a class is instantiated with `kwargs`, and the instance is called.

    Raises:
        ConfigError: if the module or function does not exist, or the class cannot be instantiated.
    """
    module_name, _, name = path.partition(":")
    module = import_user_module(module_name, "the reward function")
    found = getattr(module, name, _WITHOUT)
    if not callable(found):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        rule = "has no" if found is _WITHOUT else f"has a {type(found).__name__}, not a function, called"
        raise ConfigError(f"module {module_name} {rule} {name}; it defines {', '.join(own) or 'nothing'}")
    if not inspect.isclass(found):
        return RewardFunction(found, _metric_name(name), kwargs)
    check_arguments(found, kwargs, "reward.kwargs")
    try:
        return RewardFunction(found(**kwargs), _metric_name(name))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"reward {path} cannot be made: {type(error).__name__}: {error}; fix its class") from error


def function_name(function: Any) -> str:
    """Name of a callable in metrics."""
    return _metric_name(getattr(function, "__name__", None) or type(function).__name__)


def _metric_name(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "reward"


def sample_values(request: EnvRequest) -> dict[str, Any]:
    """Values of a sample by name, beside the columns of its row: completion, prompt, messages, completion_tokens."""
    messages = _prompt_messages(request)
    of_user = [message["content"] for message in messages if message["role"] == "user"]
    return {
        "completion": request.completion,
        "prompt": of_user[-1] if of_user else "".join(message["content"] for message in messages),
        "messages": messages,
        "completion_tokens": num_tokens(request),
    }


def _prompt_messages(request: EnvRequest) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in request.message_log[:-1]]


def num_tokens(request: EnvRequest) -> int:
    """Number of tokens of the completion."""
    return len(request.message_log[-1].get("token_ids", ()))


def _token_ids(request: EnvRequest) -> list[int]:
    return [int(token) for token in request.message_log[-1].get("token_ids", ())]


def _is_chat(request: EnvRequest) -> bool:
    own = [request.info.get(name) for name in ("prompt", "messages")]
    return len(request.message_log) > 2 or any(isinstance(value, list) for value in own)
