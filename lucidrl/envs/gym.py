"""GymEnv: one or several gymnasium environments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lucidrl.envs.arrays import FLAGS, Arrays, Frame
from lucidrl.envs.base import MAX_SEED, EnvBase
from lucidrl.envs.failures import at_least_one, checked_array, checked_reward, env_failure
from lucidrl.envs.gym_spaces import codec_of
from lucidrl.envs.specs import Bounded, Composite, Spec, Unbounded
from lucidrl.envs.specs.spec import torch_dtype_of
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.profiling.ranges import profiled

if TYPE_CHECKING:
    import gymnasium

_TAKEN_NAMES = {*FLAGS, "reward", "action", "next"}


class GymEnv(EnvBase):
    """A gymnasium environment.

    The keys of a Dict observation space become entries; any other space becomes the entry "observation". The
    elements of a Tuple space are named "0", "1", ... The entries of a nested action space are below "action". The first
    reset after `set_seed` uses seed + i for env i.

        env = GymEnv("CartPole-v1", num_envs=4)
        env.rollout(100, break_when_any_done=False)  # TensorDict of [4, 100]

    Args:
        env: id for `gymnasium.make`, or an instance, which `close` closes too.
        categorical_action_encoding: discrete actions and observations are integers; otherwise one-hot vectors.
        from_pixels: observe the rendered image as the entry "pixels", uint8 [height, width, colour].
        pixels_only: with `from_pixels`, leave out all other observations.
        info_keys: entries of gymnasium's info to observe: specs by name, or names alone if the first reset returns
            them. Every step must return them; after a reset that does not, they are zero.
        num_envs: number of envs, for a batch size of [num_envs].
        frame_skip: repeat every action this many times, or until the episode is done; rewards are summed.
        device: device of the TensorDicts.
        kwargs: arguments of `gymnasium.make`.

    Raises:
        ConfigError: for an unknown id or option, or an unsupported space.
    """

    def __init__(
        self,
        env: str | gymnasium.Env,
        *,
        categorical_action_encoding: bool = False,
        from_pixels: bool = False,
        pixels_only: bool = True,
        info_keys: Mapping[str, Spec] | Collection[str] = (),
        num_envs: int | None = None,
        frame_skip: int | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        for name, number in (("num_envs", num_envs), ("frame_skip", frame_skip)):
            at_least_one(name, 1 if number is None else number)
        super().__init__(device=device, batch_size=() if num_envs is None else (num_envs,))
        members = _members(env, num_envs, kwargs, from_pixels)
        self._members = [
            _Member(
                member,
                categorical=categorical_action_encoding,
                observes_state=not (from_pixels and pixels_only),
                observes_pixels=from_pixels,
                info_keys=info_keys,
                frame_skip=frame_skip or 1,
            )
            for member in members
        ]
        self.num_seeds = len(members)
        observation, action = self._members[0].observation_spec, self._members[0].action_spec
        self.observation_spec = observation.expand(self.batch_size).to(self.device)
        self.action_spec = action.expand((*self.batch_size, *action.shape)).to(self.device)

    @profiled("GymEnv._reset")
    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        if not self.batch_size:
            self._members[0].reset_into(out)
            return
        for index, row in enumerate(out.rows()):
            if mask is None or mask[index]:
                try:
                    self._members[index].reset_into(row)
                except Exception as error:
                    raise self._failure(index, "reset", None, error) from error

    @profiled("GymEnv._step")
    def _step_into(self, actions: Arrays, out: Frame) -> None:
        if not self.batch_size:
            self._members[0].step_into(actions, out)
            return
        for index, row in enumerate(out.rows()):
            own = {key: array[index] for key, array in actions.items()}
            try:
                self._members[index].step_into(own, row)
            except Exception as error:
                raise self._failure(index, "step", own, error) from error

    def _failure(self, index: int, phase: str, actions: Arrays | None, error: Exception) -> EnvironmentFailure:
        seed = None if self.seed is None else (self.seed + index) % (MAX_SEED + 1)
        return env_failure(index, seed, phase, actions, error)

    def _set_seed(self, seed: int) -> None:
        for index, member in enumerate(self._members):
            member.next_seed = (seed + index) % (MAX_SEED + 1)

    def _close(self) -> None:
        for member in self._members:
            member.env.close()


class _Member:
    """One gymnasium environment; writes into the frame of a single env."""

    def __init__(
        self,
        env: gymnasium.Env,
        *,
        categorical: bool,
        observes_state: bool,
        observes_pixels: bool,
        info_keys: Mapping[str, Spec] | Collection[str],
        frame_skip: int,
    ) -> None:
        import gymnasium

        self.env = env
        self.next_seed: int | None = None
        """Seed of the next reset; later resets continue the env's generator."""
        action = codec_of("action", env.action_space, categorical)
        self.action_spec = action.spec
        self._read_action = action.read
        self._step: Callable[[Any], tuple[Any, ...]] = env.step if frame_skip == 1 else self._step_repeatedly
        self._frame_skip = frame_skip
        self._observes_pixels = observes_pixels
        self._info_keys = list(info_keys)

        is_dict = isinstance(env.observation_space, gymnasium.spaces.Dict)
        state = codec_of(() if is_dict else "observation", env.observation_space, categorical)
        state_spec: Any = state.spec if is_dict else Composite(observation=state.spec)
        self._write_state = state.write if observes_state else None
        parts = [state_spec] if observes_state else []
        if observes_pixels or (info_keys and not isinstance(info_keys, Mapping)):
            _, info = env.reset()
        if observes_pixels:
            parts.append(Composite(pixels=_pixel_spec(env)))
        if info_keys:
            specs = info_keys if isinstance(info_keys, Mapping) else {key: _info_spec(key, info) for key in info_keys}
            parts.append(Composite(specs))
        self.observation_spec = _merged(parts)

    def reset_into(self, out: Frame) -> None:
        observation, info = self.env.reset(seed=self.next_seed)
        self.next_seed = None
        if self._info_keys:
            info = {key: info.get(key, np.zeros_like(out.observation[key])) for key in self._info_keys}
        self._write(observation, info, out.observation)

    def step_into(self, actions: Arrays, out: Frame) -> None:
        observation, reward, terminated, truncated, info = self._step(self._read_action(actions))
        self._write(observation, info, out.observation)
        out.reward[0] = checked_reward(reward)
        out.terminated[0] = terminated
        out.truncated[0] = truncated
        out.done[0] = terminated or truncated

    def _step_repeatedly(self, action: Any) -> tuple[Any, ...]:
        total = 0.0
        for _ in range(self._frame_skip):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += checked_reward(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info

    def _write(self, observation: Any, info: Mapping[str, Any], arrays: Arrays) -> None:
        if self._write_state is not None:
            self._write_state(observation, arrays)
        if self._observes_pixels:
            arrays["pixels"][...] = checked_array("pixels", self.env.render(), arrays["pixels"])
        for key in self._info_keys:
            if key not in info:
                names = sorted(map(str, info))
                found = f"the info of a step has no {key!r}; it has {names}"
                raise EnvironmentFailure(f"{found}; remove {key!r} from info_keys")
            arrays[key][...] = checked_array(key, info[key], arrays[key])


def _members(
    env: str | gymnasium.Env, num_envs: int | None, kwargs: dict[str, Any], from_pixels: bool
) -> list[gymnasium.Env]:
    """Make the gymnasium environments, or check the instance `env`."""
    import gymnasium

    if isinstance(env, str):
        try:
            # Our own checks are cheaper than gymnasium's checker.
            options = {"disable_env_checker": True, **({"render_mode": "rgb_array"} if from_pixels else {}), **kwargs}
            return [gymnasium.make(env, **options) for _ in range(num_envs or 1)]
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"gymnasium cannot make {env!r}: {error}; check the id and its arguments") from error
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"env is {env!r}; give a gymnasium id or an instance")
    if num_envs is not None:
        raise ConfigError(f"num_envs={num_envs} needs an id, not an instance; join instances with SerialEnv")
    if from_pixels and env.render_mode != "rgb_array":
        raise ConfigError(
            f"from_pixels needs an env made with render_mode='rgb_array'; the env has {env.render_mode!r}"
        )
    if kwargs:
        raise ConfigError(
            f"{sorted(kwargs)} are arguments of gymnasium.make, which an existing env does not use; pass the "
            "env's id, or remove them"
        )
    return [env]


def _pixel_spec(env: gymnasium.Env) -> Spec:
    """The spec of the rendered image."""
    try:
        pixels: Any = env.render()
    except Exception as error:
        raise ConfigError(f"from_pixels: render() raised {type(error).__name__}: {error}") from error
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise ConfigError(f"from_pixels needs uint8 [height, width, colour]; render() returned {pixels!r:.80}")
    return Bounded(0, 255, pixels.shape, torch.uint8)


def _info_spec(key: str, info: Mapping[str, Any]) -> Spec:
    if key not in info:
        names = sorted(map(str, info))
        raise ConfigError(f"info_keys has {key!r}, but the info of a reset has {names}; give its spec in a mapping")
    value = np.asarray(info[key])
    return Unbounded(value.shape, torch_dtype_of(value.dtype))


def _merged(parts: list[Composite]) -> Composite:
    """Merge the entries of several specs; raise ConfigError for a name that occurs twice or is reserved."""
    merged = Composite()
    for part in parts:
        for name, spec in part.items():
            if name in merged or name in _TAKEN_NAMES:
                raise ConfigError(
                    f"the entry name {name!r} is reserved or occurs twice; rename the entry in a wrapper of the env"
                )
            merged[name] = spec
    return merged
