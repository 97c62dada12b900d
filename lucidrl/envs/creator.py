"""Picklable env factories, and helpers that call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from lucidrl.envs.base import EnvBase
from lucidrl.envs.failures import at_least_one, env_failure
from lucidrl.errors import ConfigError, LucidError

EnvFactory = Callable[..., EnvBase]


class EnvCreator:
    """An env factory that can be pickled, made from any function: even a lambda, or a function in a notebook.

        EnvCreator(lambda: GymEnv("CartPole-v1"))

    Args:
        create_env_fn: makes an env.
        create_env_kwargs: arguments of `create_env_fn`.
    """

    def __init__(self, create_env_fn: EnvFactory, create_env_kwargs: Mapping[str, Any] | None = None):
        if not callable(create_env_fn):
            kind = type(create_env_fn).__name__
            raise ConfigError(f"the env factory is a {kind}; give a function, such as lambda: GymEnv('CartPole-v1')")
        self.create_env_fn = create_env_fn
        self.create_env_kwargs = dict(create_env_kwargs or {})

    def __call__(self, **kwargs: Any) -> EnvBase:
        """Make an env; `kwargs` override `create_env_kwargs`."""
        return self.create_env_fn(**{**self.create_env_kwargs, **kwargs})

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (cloudpickle.dumps((self.create_env_fn, self.create_env_kwargs)),)


def env_creators(
    num_workers: int,
    create_env_fn: EnvFactory | Sequence[EnvFactory],
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
) -> list[EnvCreator]:
    """Make one creator per env.

    Args:
        create_env_fn: a factory for all envs, or a list with one factory per env.
        create_env_kwargs: arguments of the factory for all envs, or a list with the arguments of each env.
    """
    at_least_one("num_workers", num_workers)
    functions = _one_each(num_workers, "create_env_fn", create_env_fn)
    arguments = _one_each(num_workers, "create_env_kwargs", create_env_kwargs)
    return [EnvCreator(function, kwargs) for function, kwargs in zip(functions, arguments, strict=True)]


def make_env(creator: EnvCreator, index: int) -> EnvBase:
    """Call a factory.

    Args:
        index: index of the env, for errors.

    Raises:
        EnvironmentFailure: if the factory raises an exception that is not a LucidError.
        LucidError: if the factory raises one; a note names the env.
        ConfigError: if the factory does not return an env.
    """
    try:
        env = creator()
    except LucidError as error:
        error.add_note(f"raised by the factory of env {index}")
        raise
    except Exception as error:
        raise env_failure(index, None, "start", None, error) from error
    if not isinstance(env, EnvBase):
        what = "None" if env is None else f"a {type(env).__name__}"
        raise ConfigError(f"the factory of env {index} returned {what}; return an EnvBase, such as GymEnv(env)")
    return env


def _one_each(num_workers: int, name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return [value] * num_workers
    if len(value) != num_workers:
        raise ConfigError(f"{name} has {len(value)} entries for num_workers={num_workers}; give one per env")
    return value


def _unpickle(pickled: bytes) -> EnvCreator:
    return EnvCreator(*cloudpickle.loads(pickled))
