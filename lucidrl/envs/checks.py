"""A conformance test: does an env match its specs and the contract of EnvBase?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from lucidrl.envs.arrays import FLAGS, Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.specs import Composite, Spec
from lucidrl.errors import DataError

_MOST_STEPS = 50


def check_env_specs(env: EnvBase, seed: int = 0) -> None:
    """Reset the env, step it with random actions, and compare all results with its specs and the contract of EnvBase.

    Afterwards the env is seeded and in the middle of an episode, so reset it before use.

    Raises:
        DataError: a result is wrong; the message names the entry, both values, and what to fix.
        EnvironmentFailure: if the env raises, or an entry cannot be stored with the dtype and shape of its spec.
    """
    _check_specs(env)
    steps = _check_episode(env, seed)
    _check_seed_repeats(env, seed, steps)
    if env.batch_size:
        _check_partial_reset(env)


def _check_specs(env: EnvBase) -> None:
    if not isinstance(env, EnvBase):
        raise DataError(f"{env!r} is not an EnvBase; derive it from EnvBase")
    for name in ("observation_spec", "action_spec", "reward_spec"):
        spec = getattr(env, name, None)
        if not isinstance(spec, Composite if name == "observation_spec" else Spec | Composite):
            raise DataError(f"{name} is {spec!r}; set it to a spec in __init__ (observation_spec to a Composite)")
    taken = sorted({*FLAGS, "reward", "action", "next"} & set(env.observation_spec))
    if taken:
        raise DataError(f"observation_spec has {taken[0]!r}, which is a reserved name; rename the entry")
    expected = (*env.batch_size, 1)
    if env.reward_spec.shape != expected or env.reward_spec.dtype != torch.float32:
        raise DataError(f"reward_spec is {env.reward_spec}; it must be float32 {list(expected)}")
    for key, leaf in {**env.observation_leaves(), **env.action_leaves()}.items():
        if leaf.shape[: len(env.batch_size)] != env.batch_size:
            raise DataError(f"the spec of {key!r} is {leaf}; expand it to the env's batch size {list(env.batch_size)}")


def _check_episode(env: EnvBase, seed: int) -> list[TensorDictBase]:
    """Step from a seeded reset until an episode ends, at most `_MOST_STEPS` times; return the steps."""
    if env.set_seed(seed) == seed:
        raise DataError(f"set_seed({seed}) returned {seed}; return the next unused seed")
    root = env.reset()
    _check_root(env, root, "reset()")
    steps: list[TensorDictBase] = []
    for _ in range(_MOST_STEPS):
        stepped = env.rand_action(root.clone())
        _check_entries(stepped, env.action_leaves(), "rand_action()")
        step = env.step(stepped)
        _check_next(env, step, "step()")
        if steps:
            _check_apart(steps[-1]["next"], step["next"])
        steps.append(step)
        if step["next", "done"].any():
            break
        root = _root_of(env, step["next"])
    _check_root(env, env.reset(), "reset() after an episode")
    return steps


def _check_seed_repeats(env: EnvBase, seed: int, steps: list[TensorDictBase]) -> None:
    """Check that `step_and_maybe_reset` with the same seed repeats the steps."""
    env.set_seed(seed)
    root = env.reset()
    for number, expected in enumerate(steps):
        remedy = f"draw all randomness from the seed of set_seed({seed}), and clear all state in a reset"
        _check_equal(root, expected, list(env.observation_leaves()), f"before step {number} of the same seed", remedy)
        step, root = env.step_and_maybe_reset(env.rand_action(root))
        _check_next(env, step, "step_and_maybe_reset()")
        keys: list[Key] = [*env.observation_leaves(), "reward", *FLAGS]
        _check_equal(step["next"], expected["next"], keys, f"after step {number} of the same seed", remedy)
        _check_root(env, root, "step_and_maybe_reset()")


def _check_partial_reset(env: EnvBase) -> None:
    root = env.reset()
    moved = env.step(env.rand_action(root))["next"]
    mask = torch.zeros(env.batch_size, dtype=torch.bool, device=env.device)
    mask.view(-1)[0] = True
    masked = _root_of(env, moved).set("_reset", mask)
    result = env.reset(masked.clone())
    _check_entries(result, env.observation_leaves(), "a partial reset")
    remedy = "a reset may write only the rows of its mask"
    _check_equal(result[~mask], masked[~mask], list(env.observation_leaves()), "in rows without reset", remedy)
    for name in FLAGS:
        if result[name][mask].any():
            raise DataError(f"{name!r} is still True after a partial reset of that env; set it to False in the reset")


def _check_root(env: EnvBase, root: TensorDictBase, call: str) -> None:
    _check_entries(root, {**env.observation_leaves(), **env.done_spec.leaves()}, call, env.batch_size)
    for name in FLAGS:
        if root[name].any():
            raise DataError(f"{call} returned {name!r} True; expected False: a new episode is not done")


def _check_next(env: EnvBase, step: TensorDictBase, call: str) -> None:
    if step.get("next", None) is None:
        raise DataError(f"{call} returned no 'next'; write the result of the action there")
    leaves = {**env.observation_leaves(), "reward": env.reward_spec, **env.done_spec.leaves()}
    _check_entries(step["next"], leaves, call, env.batch_size)
    done, terminated, truncated = (step["next", name] for name in FLAGS)
    if not torch.equal(done, terminated | truncated):
        raise DataError(
            f"{call} returned 'done' {done.view(-1).tolist()} with terminated {terminated.view(-1).tolist()} and "
            f"truncated {truncated.view(-1).tolist()}; done must be True where terminated or truncated is"
        )


def _check_entries(
    tensordict: TensorDictBase, leaves: Mapping[Key, Spec], call: str, batch_size: torch.Size | None = None
) -> None:
    """Check that every entry exists and fits its spec; with `batch_size`, also that there are no other entries."""
    there = set(tensordict.keys(include_nested=True, leaves_only=True))
    for key in leaves:
        if key not in there:
            raise DataError(
                f"{call} returned {_names(there)}, but not {key!r}, which is in the specs; return it or remove its spec"
            )
    if batch_size is not None and (extra := there - set(leaves)):
        raise DataError(f"{call} returned {_names(extra)}, which is not in the specs; add a spec or remove it")
    if batch_size is not None and tensordict.batch_size != batch_size:
        raise DataError(f"{call} returned batch size {list(tensordict.batch_size)}; expected {list(batch_size)}")
    for key, spec in leaves.items():
        value = tensordict[key]
        if value.shape != spec.shape or value.dtype != spec.dtype:
            got = f"{value.dtype} {list(value.shape)}"
            raise DataError(f"{key!r} from {call} is {got}; expected {spec}: fix the env or the spec")
        if not spec.is_in(value):
            raise DataError(f"{key!r} from {call} is {_range(value)}; expected {spec}: fix the env or the spec")


def _check_equal(got: TensorDictBase, expected: TensorDictBase, keys: list[Key], when: str, remedy: str) -> None:
    for key in keys:
        if not torch.equal(got[key], expected[key]):
            raise DataError(f"{key!r} {when} is {_range(got[key])}; expected {_range(expected[key])}: {remedy}")


def _check_apart(earlier: TensorDictBase, later: TensorDictBase) -> None:
    for key in later.keys(include_nested=True, leaves_only=True):
        memory = later[key].untyped_storage()
        if memory.nbytes() and memory.data_ptr() == earlier[key].untyped_storage().data_ptr():
            raise DataError(
                f"{key!r} of two steps shares memory, so the later step overwrites the earlier one; return new tensors"
            )


def _root_of(env: EnvBase, next_: TensorDictBase) -> TensorDictBase:
    """The root of the next step."""
    return next_.select(*env.observation_leaves(), *FLAGS)


def _names(keys: Any) -> str:
    return ", ".join(sorted(map(repr, keys))) or "nothing"


def _range(value: torch.Tensor) -> str:
    """The values, or their range if there are many."""
    if value.numel() <= 8:
        return str(value.tolist())
    numbers = value.double()
    return f"between {numbers.min().item():g} and {numbers.max().item():g} ({value.numel()} values)"
