"""Transform and Compose. A transform reads one frame and writes another; it also changes actions and specs.

Shapes: B the env's batch size (none for a single env).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from lucidrl.envs.arrays import Arrays, Frame, Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.failures import checked_array
from lucidrl.envs.specs import Bounded, Composite, Spec, Unbounded
from lucidrl.envs.specs.spec import torch_dtype_of
from lucidrl.errors import CheckpointError, ConfigError

State = Mapping[str, Any]
"""Learned statistics by name: numbers and arrays."""
Keys = Sequence[Key] | str


class Transform:
    """Changes the entries that an env returns (forward) and the actions that the env receives (inverse).

    A transform of single entries implements `forward`, `inverse` and `transform_spec`:

        class Degrees(Transform):
            def __init__(self):
                super().__init__(in_keys=["angle"], in_keys_inv=["action"])

            def forward(self, value):
                return np.rad2deg(value)

            def inverse(self, value):
                return np.deg2rad(value)

            def transform_spec(self, spec):
                return Bounded(-180, 180, spec.shape, spec.dtype)

    Values are [..., *shape of the entry]: `forward` receives the values of all envs of a batch, or of the envs that are
    reset. Other transforms override `reset` and `step`, which receive whole frames, and `before_step`. State of a
    transform has one row per env [*B]: `prepare` allocates it, `reset` clears the rows of its mask. An instance belongs
    to one env.

    Args:
        in_keys: entries that `forward` changes; "reward" can be one.
        out_keys: names of the changed entries, one per entry of `in_keys`; by default the same names.
        in_keys_inv: entries of the action that `inverse` changes.
    """

    steps_env: bool = False
    """Whether the transform steps the env below; such a transform does not support a batch of envs."""

    def __init__(self, in_keys: Keys = (), out_keys: Keys | None = None, in_keys_inv: Keys = ()):
        self.in_keys = as_keys(in_keys)
        self.out_keys = self.in_keys if out_keys is None else as_keys(out_keys)
        """Entries that the transform writes, including new ones."""
        self.in_keys_inv = as_keys(in_keys_inv)
        self._check_pairs()
        self.parent: EnvBase | None = None
        """The env whose frames the transform reads; set by TransformedEnv."""

    # ---- single entries

    def forward(self, value: np.ndarray) -> np.ndarray:
        """The new value of an entry; does not write to `value`."""
        raise NotImplementedError(f"{type(self).__name__} has in_keys, but does not implement forward")

    def forward_entry(self, key: Key, value: np.ndarray) -> np.ndarray:
        """`forward` with the key of the entry, for a transform that differs by entry."""
        return self.forward(value)

    def inverse(self, value: np.ndarray) -> np.ndarray:
        """The action value that the env receives; does not write to `value`."""
        raise NotImplementedError(f"{type(self).__name__} has in_keys_inv, but does not implement inverse")

    def transform_spec(self, spec: Spec) -> Spec:
        """The spec of the result of `forward`: by default, any numbers of the same shape and dtype."""
        return Unbounded(spec.shape, spec.dtype, spec.device)

    # ---- whole frames

    def prepare(self, env: EnvBase) -> None:
        """Check the env below and allocate state; called once, before all other methods."""

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        """Write the observation of new episodes, in the envs of the mask [*B] or in all envs.

        Other rows of the target keep their values; other rows of the source are undefined. Both frames share the flags,
        and entries that this transform neither writes nor removes.
        """
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if in_key != "reward":
                value = self.forward_entry(in_key, rows_of(source.observation[in_key], mask))
                # Shape and dtype are checked in resets only, to keep steps fast.
                array = target.observation[out_key]
                array[... if mask is None else mask] = checked_array(out_key, value, rows_of(array, mask))

    def step(self, source: Frame, target: Frame) -> None:
        """Write the transformed entries of a step, in all envs."""
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if in_key == "reward":
                target.reward[...] = self.forward_entry(in_key, source.reward)
            else:
                target.observation[out_key][...] = self.forward_entry(in_key, source.observation[in_key])

    def before_step(self, actions: Arrays) -> Arrays:
        """The actions that the env receives; does not write to `actions`."""
        if not self.in_keys_inv:
            return actions
        return actions | {key: self.inverse(actions[key]) for key in self.in_keys_inv}

    # ---- specs

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """The spec of the transformed observation; may change `spec`."""
        leaves = spec.leaves()
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if in_key != "reward":
                spec[out_key] = self.transform_spec(leaves[in_key])
        return spec

    def transform_reward_spec(self, spec: Spec) -> Spec:
        """The spec of the transformed reward."""
        return self.transform_spec(spec) if "reward" in self.in_keys else spec

    def transform_action_spec(self, spec: Spec | Composite) -> Spec | Composite:
        """The spec of the actions that `inverse` takes."""
        return spec

    # ---- seed and state

    def set_seed(self, seed: int) -> None:
        """Seed the random generator of this transform, if any."""

    def state_dict(self) -> dict[str, Any]:
        """Return learned statistics; the state of the current episodes is not part of them."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Load a result of `state_dict`.

        Raises:
            CheckpointError: if the state was saved from another transform.
        """
        if state:
            name, names = type(self).__name__, ", ".join(state)
            raise CheckpointError(
                f"{name} learns nothing, but the state has {names}; load it into the transforms it was saved from"
            )

    def clone(self) -> Self:
        """A copy with the same parameters and statistics, for another env."""
        # deepcopy replaces the env by None
        return copy.deepcopy(self, {id(self.parent): None})

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _check_pairs(self) -> None:
        name, read, written = type(self).__name__, self.in_keys, self.out_keys
        if len(read) != len(written):
            raise ConfigError(f"{name} reads {len(read)} entries, but out_keys has {len(written)}; give one per entry")
        for in_key, out_key in zip(read, written, strict=True):
            if in_key != out_key and "reward" in (in_key, out_key):
                raise ConfigError(
                    f"{name} cannot write {in_key!r} as {out_key!r}: a reward keeps its key; leave out out_keys"
                )


class Compose:
    """Several transforms in order; the first one is next to the env. A nested Compose is flattened."""

    def __init__(self, *transforms: Transform | Compose):
        self._transforms: list[Transform] = []
        for transform in transforms:
            self._transforms += transforms_of(transform)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of all transforms; each name is prefixed with the index of its transform."""
        return {
            f"{index}.{name}": value
            for index, transform in enumerate(self)
            for name, value in transform.state_dict().items()
        }

    def load_state_dict(self, state: State) -> None:
        """Load a result of `state_dict`.

        Raises:
            CheckpointError: if the state was saved from other transforms.
        """
        parts: list[dict[str, Any]] = [{} for _ in self]
        for name, value in state.items():
            index, _, rest = name.partition(".")
            if not index.isdecimal() or int(index) >= len(parts):
                raise CheckpointError(
                    f"the state has {name!r}, but there are {len(parts)} transforms; load it into the transforms it "
                    "was saved from"
                )
            parts[int(index)][rest] = value
        for transform, part in zip(self, parts, strict=True):
            transform.load_state_dict(part)

    def clone(self) -> Compose:
        """A copy of all transforms, for another env."""
        return Compose(*(transform.clone() for transform in self))

    def __iter__(self) -> Iterator[Transform]:
        return iter(self._transforms)

    def __len__(self) -> int:
        return len(self._transforms)

    def __getitem__(self, index: int) -> Transform:
        return self._transforms[index]

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self))})"


def transforms_of(transform: Transform | Compose) -> list[Transform]:
    """Return the transforms of a Compose, or the single transform, as a list.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(transform, Compose):
        return list(transform)
    if isinstance(transform, Transform):
        return [transform]
    raise ConfigError(f"{transform!r} is not a transform; give a Transform or a Compose")


def as_keys(keys: Keys) -> tuple[Key, ...]:
    """Keys as a tuple; a single name is one key."""
    return (keys,) if isinstance(keys, str) else tuple(keys)


def rows_of(array: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The rows of the mask, or all rows."""
    return array if mask is None else array[mask]


def mapped_spec(spec: Spec, function: Callable[[np.ndarray], np.ndarray]) -> Spec:
    """The spec of `function(value)`, which must be monotonic in every element of the value."""
    limits = (spec.low, spec.high) if isinstance(spec, Bounded) else (spec.zero(), spec.zero())
    with np.errstate(all="ignore"):  # infinite limits may overflow or give NaN
        first, second = (function(limit.cpu().numpy()) for limit in limits)
    dtype = torch_dtype_of(first.dtype)
    if not isinstance(spec, Bounded) or np.isnan(first).any() or np.isnan(second).any():
        return Unbounded(first.shape, dtype, spec.device)
    return Bounded(np.minimum(first, second), np.maximum(first, second), first.shape, dtype, spec.device)
