"""Make environments by name, and check their prompts."""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.guessing import GuessingConfig, GuessingEnv
from lucidrl.envs.text.interfaces import TextEnv
from lucidrl.envs.text.reasoning_gym import ReasoningGymConfig, ReasoningGymEnv
from lucidrl.envs.text.word_problems import WordProblemsConfig, WordProblemsEnv
from lucidrl.errors import ConfigError, DataError
from lucidrl.utils.config import Config, validate
from lucidrl.utils.imports import import_user_module

ENVS: dict[str, tuple[Callable[[Any], TextEnv], type[Config]]] = {
    "arithmetic": (ArithmeticEnv, ArithmeticConfig),
    "guessing": (GuessingEnv, GuessingConfig),
    "reasoning_gym": (ReasoningGymEnv, ReasoningGymConfig),
    "word_problems": (WordProblemsEnv, WordProblemsConfig),
}


def make_env(name: str, kwargs: Mapping[str, Any]) -> TextEnv:
    """Make a built-in environment from its config, or a user's `module:Class` with the arguments `kwargs`.

    Python also looks for the module in the working directory.

    Raises:
        ConfigError: for an unknown name, module or class, a class that is not a text environment, wrong arguments, or
            an exception of the constructor.
    """
    if name in ENVS:
        build, schema = ENVS[name]
        return build(validate(schema, dict(kwargs), at="env.kwargs"))
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        close = difflib.get_close_matches(name, ENVS, n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"use {', '.join(ENVS)}, or the import path of your class, module:Class"
        )
        raise ConfigError(f"unknown environment {name!r}; {hint}")
    env_class = _env_class(import_user_module(module_name), class_name)
    try:
        inspect.signature(env_class).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{name} does not accept env.kwargs: {error}; see its __init__") from error
    try:
        return env_class(**kwargs)
    except (KeyboardInterrupt, ConfigError):  # Ctrl-C
        raise
    except BaseException as error:  # SystemExit would end the run silently
        raised = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{name} cannot be made with kwargs {dict(kwargs)}: {raised}") from error


def checked_prompts(
    own: Sequence[Prompt] | None, config: EnvConfig, validation: Sequence[Prompt] | None = None
) -> Sequence[Prompt]:
    """Return the prompts of an environment.

    Args:
        own: result of the environment's `prompts()`; None if it has no such method.
        validation: result of its `validation_prompts()`; None if it has no such method.

    Raises:
        LucidError: there are no prompts, or two have the same id.
    """
    if own is None:
        raise ConfigError(f"environment {config.name} has no method prompts(); add it, or set data.file")
    if not own:
        raise DataError(f"environment {config.name} has no prompts; return at least one from prompts()")
    prompt_id, count = Counter(prompt.prompt_id for prompt in [*own, *(validation or ())]).most_common(1)[0]
    if count > 1:
        raise DataError(f"environment {config.name} has {count} prompts with the id {prompt_id!r}; make ids unique")
    return own


def _env_class(module: ModuleType, class_name: str) -> type[TextEnv]:
    env_class = getattr(module, class_name, None)
    if not inspect.isclass(env_class):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        defined = ", ".join(own) or "nothing"
        raise ConfigError(f"module {module.__name__} has no class {class_name}; it defines {defined}")
    if not inspect.iscoroutinefunction(getattr(env_class, "step", None)):
        raise ConfigError(f"{module.__name__}:{class_name} has no `async def step(self, batch)`; define it")
    return cast("type[TextEnv]", env_class)
