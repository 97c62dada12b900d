"""The arrays that an environment writes into: made once, written every step.

Shapes: B the env's batch size (none for a single env).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Key = str | tuple[str, ...]
"""Name of an entry; a tuple is the path to a nested one."""
Arrays = dict[Key, np.ndarray]

FLAGS = ("done", "terminated", "truncated")


class Frame:
    """One moment of an env, as it stands after a reset or a step; all arrays are [*B, *shape] and of a fixed dtype.

    Whoever makes a frame may keep it and have it written again and again. An env that works on parts of it, or that
    wraps another env, keeps what it derives from a frame in `derived`, under a key of its own, so that a frame which
    comes again costs nothing.
    """

    __slots__ = ("derived", "done", "observation", "reward", "terminated", "truncated")

    def __init__(
        self,
        observation: Arrays,
        reward: np.ndarray,
        done: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ):
        self.observation = observation
        """By key; everything the env tells beside reward and flags."""
        self.reward = reward
        """[*B, 1] float32; of no meaning after a reset."""
        self.done = done
        """[*B, 1] bool: terminated or truncated."""
        self.terminated = terminated
        """[*B, 1] bool: the episode came to its own end."""
        self.truncated = truncated
        """[*B, 1] bool: the episode was cut off."""
        self.derived: dict[Any, Any] = {}

    def arrays(self) -> Arrays:
        """All of them by key; observation entries first."""
        return {**self.observation, "reward": self.reward, **self.flags()}

    def flags(self) -> Arrays:
        """The three flags by name."""
        return {name: getattr(self, name) for name in FLAGS}

    @classmethod
    def of(cls, arrays: Mapping[Key, np.ndarray]) -> Frame:
        """The reverse of `arrays`."""
        rest = dict(arrays)
        reward, *flags = (rest.pop(name) for name in ("reward", *FLAGS))
        return cls(rest, reward, *flags)

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Frame:
        """The same frame on other arrays, such as views of these."""
        return Frame.of({key: function(array) for key, array in self.arrays().items()})

    def row(self, index: int) -> Frame:
        """The part of env `index`; writing to it writes here."""
        return self.map(lambda array: array[index, ...])  # the dots make a view of a single number too

    def clear_flags(self, mask: np.ndarray | None = None) -> None:
        """Nothing is done, in the envs that the mask [*B] picks, or in all."""
        for flags in (self.done, self.terminated, self.truncated):
            if mask is None:
                flags.fill(False)
            else:
                flags[mask] = False


def copy_rows(source: Arrays, target: Arrays, mask: np.ndarray | None = None) -> None:
    """Copy what both have, in the envs that the mask [*B] picks, or in all."""
    for key, array in target.items():
        if mask is None:
            array[...] = source[key]
        else:
            array[mask] = source[key][mask]
