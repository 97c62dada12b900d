"""Envs of gymnasium that can be put back into the middle of an episode: by playing it again.

The state of an env is beyond reach, but what led to it is not: the generator as it was before the reset, and the
actions since. An env that draws from its own generator only is then where it was, to the bit.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lucidrl.errors import CheckpointError

if TYPE_CHECKING:
    import gymnasium

log = logging.getLogger(__name__)


class EpisodeTape:
    """Stands before an env of gymnasium and remembers what it takes to play its episode again."""

    def __init__(self, env: gymnasium.Env):
        self._env = env
        self._seed: int | None = None
        """The last one given."""
        self._generator: Mapping[str, Any] | None = None
        """State of the env's generator before the last reset; None after a reset with a seed, or if it has none."""
        self._actions: list[np.ndarray] = []
        self._observation: Any = None
        self._resumed: Mapping[str, Any] | None = None
        """What the next reset has to play."""

    def taped_env(self) -> gymnasium.Env:
        """The env, whose resets and steps go through this tape."""
        import gymnasium

        wrapper: Any = gymnasium.Wrapper(self._env)
        wrapper.reset, wrapper.step = self.reset, self.step
        return wrapper

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the first time after `load_state_dict`, go on with the one that was saved."""
        if self._resumed is not None:
            resumed, self._resumed = self._resumed, None
            return self._play(resumed)
        if seed is None:
            self._generator = _generator_state(self._env)
        else:
            self._seed, self._generator = seed, None
        self._actions = []
        self._observation, info = self._env.reset(seed=seed, options=options)
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._actions.append(np.array(action))
        result = self._env.step(action)
        self._observation = result[0]
        return result

    def state_dict(self) -> dict[str, Any]:
        """The episode so far, as plain values."""
        return {
            "seed": self._seed,
            "generator": self._generator,
            "actions": [action.tolist() for action in self._actions],
            "observation": _digest(self._observation),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed = state

    def _play(self, saved: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        observation, info = self.reset(seed=saved["seed"])
        if saved["generator"] is not None:
            self._env.unwrapped.np_random.bit_generator.state = saved["generator"]
            observation, info = self.reset()
        for action in saved["actions"]:
            observation, _, terminated, truncated, info = self.step(np.array(action, self._env.action_space.dtype))
            if terminated or truncated:
                log.warning("an episode of %s ended before it came to where it was saved; a new one begins", self._env)
                return self.reset()
        if _digest(observation) != saved["observation"]:
            log.warning("%s does not play an episode twice alike: the run goes on, but not to the bit", self._env)
        return observation, info


class EpisodeTapes:
    """Those of several envs, kept together."""

    def __init__(self, tapes: Sequence[EpisodeTape]):
        self._tapes = tapes

    def state_dict(self) -> list[dict[str, Any]]:
        return [tape.state_dict() for tape in self._tapes]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        if len(state) != len(self._tapes):
            raise CheckpointError(
                f"the run was saved with env.num_envs={len(state)}, not {len(self._tapes)}; resume with that number"
            )
        for tape, saved in zip(self._tapes, state, strict=True):
            tape.load_state_dict(saved)


def _generator_state(env: gymnasium.Env) -> dict[str, Any] | None:
    """As plain values; None if the env has put something else than a `numpy.random.Generator` in its place."""
    generator = env.unwrapped.np_random
    return _plain(generator.bit_generator.state) if isinstance(generator, np.random.Generator) else None


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _digest(observation: Any) -> str:
    return hashlib.blake2b(np.asarray(observation).tobytes(), digest_size=16).hexdigest()
