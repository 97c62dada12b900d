"""From an environment's name in the configuration to the environment and its prompts."""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

from lucidrl.data.datasets import Prompt, load_prompts, split
from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.guessing import GuessingConfig, GuessingEnv
from lucidrl.envs.text.interfaces import TextEnv
from lucidrl.errors import ConfigError, DataError
from lucidrl.utils.config import Config, validate
from lucidrl.utils.imports import import_user_module

ENVS: dict[str, tuple[Callable[[Any], TextEnv], type[Config]]] = {
    "arithmetic": (ArithmeticEnv, ArithmeticConfig),
    "guessing": (GuessingEnv, GuessingConfig),
}


def make_env(name: str, kwargs: Mapping[str, Any]) -> TextEnv:
    """Build a built-in environment from its config, or a user's `module:Class` with `kwargs` as its arguments.

    Modules are looked up in the working directory too.

    Raises:
        ConfigError: for an unknown name, a module or class that cannot be found, a class that is no text environment,
            arguments that it does not take, or anything that its constructor raises.
    """
    if name in ENVS:
        build, schema = ENVS[name]
        return build(validate(schema, dict(kwargs), at="env.kwargs"))
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        close = difflib.get_close_matches(name, ENVS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(ENVS)}, or module:Class of your own"
        raise ConfigError(f"unknown environment {name!r}; {hint}")
    env_class = _env_class(import_user_module(module_name), class_name)
    try:
        inspect.signature(env_class).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(f"{name} does not take the arguments in kwargs: {error}; see its __init__") from error
    try:
        return env_class(**kwargs)
    except (Exception, SystemExit, GeneratorExit) as error:  # the last two would end the run without a word
        raise ConfigError(
            f"{name} cannot be made with kwargs {dict(kwargs)}: {type(error).__name__}: {error}"
        ) from error


def split_prompts(own: Sequence[Prompt] | None, config: EnvConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training and validation prompts: of `prompts_file` if given, otherwise the environment's own, if it has any."""
    if config.prompts_file is not None:
        prompts: Sequence[Prompt] = load_prompts(config.prompts_file)
    elif own is not None:
        prompts = own
    else:
        raise ConfigError(
            f"environment {config.name} brings no prompts and env.prompts_file is not set; "
            "give it a method prompts(), or set env.prompts_file to a JSONL file"
        )
    if not prompts:
        raise DataError(f"environment {config.name} has no prompts; let its method prompts() return at least one")
    prompt_id, count = Counter(prompt.prompt_id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise DataError(f"environment {config.name} gives {count} prompts the id {prompt_id!r}; ids are unique")
    return split(prompts, config.validation_fraction)


def _env_class(module: ModuleType, class_name: str) -> type[TextEnv]:
    env_class = getattr(module, class_name, None)
    if not inspect.isclass(env_class):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(
            f"module {module.__name__} has no class {class_name}; it defines {', '.join(own) or 'nothing'}"
        )
    if not inspect.iscoroutinefunction(getattr(env_class, "step", None)):
        raise ConfigError(
            f"{module.__name__}:{class_name} has no asynchronous method step; define `async def step(self, batch)`"
        )
    return cast("type[TextEnv]", env_class)
