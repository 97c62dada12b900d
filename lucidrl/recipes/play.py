"""`lucidrl play`: play greedy episodes with a trained control policy, and record videos."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lucidrl.checkpoint.config import CONFIG_NAME
from lucidrl.envs.gym import GymEnv
from lucidrl.envs.serial import SerialEnv
from lucidrl.errors import ConfigError
from lucidrl.models.control.policy import ControlPolicy
from lucidrl.models.sources import find_checkpoint
from lucidrl.recipes.configs import PPORunConfig
from lucidrl.recipes.control import gymnasium_env, spaces_of
from lucidrl.utils.config import load_config, merged_settings
from lucidrl.utils.imports import require_package

if TYPE_CHECKING:
    import gymnasium

FRAMES_PER_SECOND = 30
"""Frame rate of videos if the env has no `render_fps`."""
FORMATS = {".mp4": "imageio_ffmpeg", ".gif": "imageio"}
"""Kinds of videos, and the packages that write them."""


class PlayedEpisode(NamedTuple):
    """The result of an episode."""

    reward: float
    """Sum of its rewards."""
    length: int
    """Number of its frames."""
    is_cut: bool
    """Whether it was cut off before its end."""


def play(
    source: str, num_episodes: int, seed: int, max_frames: int, video: Path | None = None
) -> Iterator[PlayedEpisode]:
    """Play episodes with the likeliest actions; consecutive episodes have consecutive seeds.

    Args:
        source: a run folder of `lucidrl ppo`, RUN@best, or a checkpoint folder.
        max_frames: frames after which an episode is cut off.
        video: file to record all episodes in, .mp4 or .gif.

    Raises:
        ConfigError: the source is not a run of `lucidrl ppo`, or the video cannot be written.
    """
    if video is not None:
        _check_video(video)
    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        raise ConfigError(f"{source} is neither a run folder nor a checkpoint; choose a run of `lucidrl ppo`")
    config = _settings(checkpoint.path.parent.parent)
    if video is not None:
        rendered = config.env.model_copy(update={"kwargs": {**config.env.kwargs, "render_mode": "rgb_array"}})
        config = config.model_copy(update={"env": rendered})
    with ExitStack() as stack:
        task = gymnasium_env(config.env)
        if video is not None:
            task = stack.enter_context(_recorded(task, video))
        env = SerialEnv(1, lambda: GymEnv(task))
        stack.callback(env.close)
        policy = ControlPolicy(*spaces_of(env, config.env.name), config.policy, config.critic)
        policy.load_weights(checkpoint.path)
        greedy = policy.greedy.cpu()  # one frame at a time is fastest there
        for number in range(num_episodes):
            env.set_seed(seed + number)
            frames = env.rollout(max_frames, greedy)
            done = bool(frames["next", "done"][0, -1])
            yield PlayedEpisode(float(frames["next", "reward"].double().sum()), frames.shape[-1], not done)


def _settings(run: Path) -> PPORunConfig:
    path = run / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(f"{run} has no {CONFIG_NAME}, which names the env; keep the checkpoint in its run folder")
    if "ppo" not in merged_settings(path, resolve=False):
        raise ConfigError(f"{run} is not a run of `lucidrl ppo`; try a language model with `lucidrl generate {run}`")
    return load_config(PPORunConfig, path)


def _check_video(video: Path) -> None:
    if video.suffix not in FORMATS:
        raise ConfigError(f"--video {video} has the suffix {video.suffix!r}; choose {' or '.join(FORMATS)}")
    if video.exists():
        raise ConfigError(f"--video {video} exists already; choose another file, or remove it")
    if not video.parent.is_dir():
        raise ConfigError(f"--video {video}: the folder {video.parent} does not exist; create it first")
    for package in ("imageio", FORMATS[video.suffix]):
        require_package(package, "--video", "pixels")


@contextmanager
def _recorded(env: gymnasium.Env, video: Path) -> Iterator[gymnasium.Env]:
    """The env with its pictures written to a video; a failure removes the file."""
    import gymnasium
    import imageio.v2 as imageio

    fps = env.metadata.get("render_fps") or FRAMES_PER_SECOND
    # 8-bit video needs an even width and height; GIF counts in milliseconds.
    options: dict[str, Any] = {"duration": 1000 / fps, "loop": 0}
    if video.suffix == ".mp4":
        options = {"fps": fps, "macro_block_size": 2}
    with ExitStack() as stack:
        try:
            writer: Any = stack.enter_context(imageio.get_writer(video, mode="I", **options))
        except Exception as error:  # raised by the video package or by ffmpeg
            raise ConfigError(f"--video {video} cannot be written ({error}); choose another file") from error

        def write_picture() -> None:
            try:
                picture: Any = env.render()
            except Exception as error:  # raised by the env, for instance if pygame is missing
                raise ConfigError(f"--video: {env} cannot be rendered: {type(error).__name__}: {error}") from error
            if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.dtype != np.uint8:
                raise ConfigError(
                    f"--video: {env} renders {picture!r:.60}, not uint8 [height, width, colour]; its render mode "
                    "rgb_array must return pictures"
                )
            writer.append_data(picture)

        wrapper: Any = gymnasium.Wrapper(env)

        def reset(**options: Any) -> Any:
            result = env.reset(**options)
            write_picture()
            return result

        def step(action: Any) -> Any:
            result = env.step(action)
            write_picture()
            return result

        wrapper.reset, wrapper.step = reset, step
        try:
            yield wrapper
        except BaseException:
            with suppress(Exception):
                writer.close()
            video.unlink(missing_ok=True)
            raise
