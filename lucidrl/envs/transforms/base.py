"""What a transform is: how it reads one frame and writes another, how it changes actions and specs.

Shapes: B the env's batch size (none for a single env).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lucidrl.envs.arrays import Arrays, Frame, Key
from lucidrl.envs.failures import checked_array
from lucidrl.envs.specs import Bounded, Composite, Spec, Unbounded
from lucidrl.envs.specs.spec import torch_dtype_of
from lucidrl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from lucidrl.envs.base import EnvBase

State = Mapping[str, Any]
"""What a transform learned, as plain numbers and arrays by name."""
Keys = Sequence[Key] | str


class Transform:
    """Changes what an env tells (forward) and what it is told (inverse).

    One that treats every entry by itself says how, and what that makes of a spec:

        class Degrees(Transform):
            def __init__(self):
                super().__init__(in_keys=["angle"], in_keys_inv=["action"])

            def forward(self, value):
                return np.rad2deg(value)

            def inverse(self, value):
                return np.deg2rad(value)

            def transform_spec(self, spec):
                return Bounded(-180, 180, spec.shape, spec.dtype)

    Values are [..., *shape of the entry]: `forward` sees all envs of a batch, or those that are being reset, and may
    rely on the trailing dims alone. One that needs more overrides `reset` and `step`, which get whole frames, and
    `before_step`. State of an env is kept per row [*B] and begun anew by `reset`, in the rows of its mask; it is
    allocated in `prepare`. An instance belongs to one env.

    Args:
        in_keys: entries that `forward` changes; "reward" is one.
        out_keys: what they are called after it; by default the same.
        in_keys_inv: entries of the action that `inverse` changes.
    """

    steps_env: bool = False
    """Whether it steps the env below by itself, which a batch of envs does not allow."""

    def __init__(self, in_keys: Keys = (), out_keys: Keys | None = None, in_keys_inv: Keys = ()):
        self.in_keys = as_keys(in_keys)
        self.out_keys = self.in_keys if out_keys is None else as_keys(out_keys)
        """What is written; a transform that adds entries of its own names them here."""
        self.in_keys_inv = as_keys(in_keys_inv)
        self._check_pairs()
        self.parent: EnvBase | None = None
        """The env below this transform, once it has one; what it reads are that env's frames."""

    # ---- entry by entry

    def forward(self, value: np.ndarray) -> np.ndarray:
        """What an entry becomes; `value` itself stays as it is."""
        raise NotImplementedError(f"{type(self).__name__} has in_keys but no forward; fill it")

    def forward_entry(self, key: Key, value: np.ndarray) -> np.ndarray:
        """What the entry that is read as `key` becomes, where that depends on the entry."""
        return self.forward(value)

    def inverse(self, value: np.ndarray) -> np.ndarray:
        """What the env is told for an entry of the action; `value` itself stays as it is."""
        raise NotImplementedError(f"{type(self).__name__} has in_keys_inv but no inverse; fill it")

    def transform_spec(self, spec: Spec) -> Spec:
        """The spec of what `forward` makes: by default, any numbers of the same shape and dtype."""
        return Unbounded(spec.shape, spec.dtype, spec.device)

    # ---- frame by frame

    def prepare(self, env: EnvBase) -> None:
        """Called once, before all else, with the env below: check what it offers, and allocate state."""

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        """Write the observation of new episodes, in the envs that the mask [*B] picks, or in all.

        Other rows of the target stay, and those of the source mean nothing. Entries that this transform neither
        writes nor removes are the same arrays in both frames; flags always are.
        """
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if in_key != "reward":
                value = self.forward_entry(in_key, rows_of(source.observation[in_key], mask))
                # Steps are not checked, for their number; what comes of a reset tells as much.
                array = target.observation[out_key]
                array[... if mask is None else mask] = checked_array(out_key, value, rows_of(array, mask))

    def step(self, source: Frame, target: Frame) -> None:
        """Write what this transform makes of a step, in all envs."""
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if in_key == "reward":
                target.reward[...] = self.forward_entry(in_key, source.reward)
            else:
                target.observation[out_key][...] = self.forward_entry(in_key, source.observation[in_key])

    def before_step(self, actions: Arrays) -> Arrays:
        """What the env is told; the arrays given are not written to."""
        if not self.in_keys_inv:
            return actions
        return actions | {key: self.inverse(actions[key]) for key in self.in_keys_inv}

    # ---- specs

    def transform_observation_spec(self, spec: Composite) -> Composite:
        """Specs of the observation above this transform; the one given is the caller's to change."""
        leaves = spec.leaves()
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            if in_key != "reward":
                spec[out_key] = self.transform_spec(leaves[in_key])
        return spec

    def transform_reward_spec(self, spec: Spec) -> Spec:
        """Spec of the reward above this transform."""
        return self.transform_spec(spec) if "reward" in self.in_keys else spec

    def transform_action_spec(self, spec: Spec | Composite) -> Spec | Composite:
        """Spec of what is told to the env above this transform; `inverse` takes it to the one given."""
        return spec

    # ---- the rest

    def set_seed(self, seed: int) -> None:
        """Seed the randomness of this transform, if it has any."""

    def state_dict(self) -> dict[str, Any]:
        """What was learned, to be kept or to be given to another instance; not where the envs stand."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` gave.

        Raises:
            CheckpointError: if it is of another transform.
        """
        if state:
            raise CheckpointError(
                f"{type(self).__name__} learns nothing, but the state has {', '.join(state)}; load that of the same "
                "transforms in the same order"
            )

    def clone(self) -> Self:
        """Another instance with the same parameters that learned the same, for another env."""
        # The env is left behind: to deepcopy it is known already, as None.
        return copy.deepcopy(self, {id(self.parent): None})

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _check_pairs(self) -> None:
        name, read, written = type(self).__name__, self.in_keys, self.out_keys
        if len(read) != len(written):
            raise ConfigError(f"{name} reads {len(read)} entries, but out_keys has {len(written)}; give one for each")
        for in_key, out_key in zip(read, written, strict=True):
            if in_key != out_key and "reward" in (in_key, out_key):
                raise ConfigError(f"{name} would write {in_key!r} as {out_key!r}; a reward can only stay the reward")


class Compose:
    """Transforms one after the other: the first is next to the env. A Compose within counts as its transforms."""

    def __init__(self, *transforms: Transform | Compose):
        self._transforms: list[Transform] = []
        for transform in transforms:
            self._transforms += transforms_of(transform)

    def state_dict(self) -> dict[str, Any]:
        """What all of them learned, each name after the transform's place."""
        return {
            f"{place}.{name}": value
            for place, transform in enumerate(self)
            for name, value in transform.state_dict().items()
        }

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` gave.

        Raises:
            CheckpointError: if it is of other transforms.
        """
        parts: list[dict[str, Any]] = [{} for _ in self]
        for name, value in state.items():
            place, _, rest = name.partition(".")
            if not place.isdecimal() or int(place) >= len(parts):
                raise CheckpointError(
                    f"the state has {name!r}, but there are {len(parts)} transforms here; load theirs"
                )
            parts[int(place)][rest] = value
        for transform, part in zip(self, parts, strict=True):
            transform.load_state_dict(part)

    def clone(self) -> Compose:
        """Other instances of all, for another env."""
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
    """One, or all of a Compose.

    Raises:
        ConfigError: if it is something else.
    """
    if isinstance(transform, Compose):
        return list(transform)
    if isinstance(transform, Transform):
        return [transform]
    raise ConfigError(f"{transform!r} is no transform; give an instance of Transform or Compose")


def as_keys(keys: Keys) -> tuple[Key, ...]:
    """Keys as a tuple; a single name is one key."""
    return (keys,) if isinstance(keys, str) else tuple(keys)


def rows_of(array: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """The rows that the mask picks, or all."""
    return array if mask is None else array[mask]


def mapped_spec(spec: Spec, function: Callable[[np.ndarray], np.ndarray]) -> Spec:
    """The spec of `function(value)`, which grows, or falls, with every element of the value."""
    limits = (spec.low, spec.high) if isinstance(spec, Bounded) else (spec.zero(), spec.zero())
    with np.errstate(all="ignore"):  # infinite limits may overflow or become NaN
        first, second = (function(limit.cpu().numpy()) for limit in limits)
    dtype = torch_dtype_of(first.dtype)
    if not isinstance(spec, Bounded) or np.isnan(first).any() or np.isnan(second).any():
        return Unbounded(first.shape, dtype, spec.device)
    return Bounded(np.minimum(first, second), np.maximum(first, second), first.shape, dtype, spec.device)
