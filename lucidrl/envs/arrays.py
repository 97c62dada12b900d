"""The arrays that an env writes into: allocated once, written in every step.

Shapes: B the env's batch size (none for a single env).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

Key = str | tuple[str, ...]
"""Name of an entry; a tuple of names is the path to a nested entry."""
Arrays = dict[Key, np.ndarray]

FLAGS = ("done", "terminated", "truncated")


@dataclass(slots=True, eq=False)
class Frame:
    """Observation, reward and flags of an env after a reset or a step; arrays are [*B, *shape] and of a fixed dtype.

    A frame may be written many times. An env that wraps other envs caches the views that it derives from a frame in
    `derived`, under a unique key.
    """

    observation: Arrays
    """All entries except reward and flags, by key."""
    reward: np.ndarray
    """[*B, 1] float32; undefined after a reset."""
    done: np.ndarray
    """[*B, 1] bool: terminated or truncated."""
    terminated: np.ndarray
    """[*B, 1] bool: the episode reached a final state."""
    truncated: np.ndarray
    """[*B, 1] bool: the episode was cut off."""
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def arrays(self) -> Arrays:
        """All arrays by key; observation entries first."""
        return {**self.observation, "reward": self.reward, **self.flags()}

    def flags(self) -> Arrays:
        """The three flags by name."""
        return {name: getattr(self, name) for name in FLAGS}

    @classmethod
    def of(cls, arrays: Mapping[Key, np.ndarray]) -> Frame:
        """Make a frame from all its arrays by key; the reverse of `arrays`."""
        rest = dict(arrays)
        reward, *flags = (rest.pop(name) for name in ("reward", *FLAGS))
        return cls(rest, reward, *flags)

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Frame:
        """A frame of the results of `function` for every array, such as views."""
        return Frame.of({key: function(array) for key, array in self.arrays().items()})

    def rows(self) -> list[Frame]:
        """One view per index of the first batch dim."""
        if "rows" not in self.derived:
            # The ellipsis makes a view even where plain indexing would return a number.
            self.derived["rows"] = [self.map(itemgetter((row, ...))) for row in range(len(self.reward))]
        return self.derived["rows"]

    def clear_flags(self, mask: np.ndarray | None = None) -> None:
        """Set all flags to False, in the envs of the mask [*B] or in all envs."""
        for flags in (self.done, self.terminated, self.truncated):
            if mask is None:
                flags.fill(False)
            else:
                flags[mask] = False


def path_of(key: Key) -> tuple[str, ...]:
    """The names that lead to an entry."""
    return (key,) if isinstance(key, str) else key


def copy_rows(source: Arrays, target: Arrays, mask: np.ndarray | None = None) -> None:
    """Copy the entries that `target` has from `source`, in the envs of the mask [*B] or in all envs."""
    for key, array in target.items():
        if mask is None:
            array[...] = source[key]
        else:
            array[mask] = source[key][mask]
