"""Episodes of a trained control policy, and videos of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import imageio.v3 as imageio
import pytest
import torch

from lucidrl.algorithms.validation import EpisodeValidator
from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.checkpoint.pruning import remove_part
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.models.control.policy import ControlPolicy
from lucidrl.recipes.control import make_envs, spaces_of
from lucidrl.recipes.folder import create_run_folder
from lucidrl.recipes.play import play
from lucidrl.recipes.settings import new_settings


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run of CartPole with an untrained policy that balances differently from seed to seed."""
    monkeypatch.chdir(tmp_path)
    config = new_settings("ppo", overrides=["env.kwargs.max_episode_steps=40"])
    folder = create_run_folder(config)
    torch.manual_seed(3)
    envs, _ = make_envs(config.env, 1)
    policy = ControlPolicy(*spaces_of(envs, config.env.name), config.policy, config.critic)
    with torch.no_grad():
        policy.network.body.layers[-1].bias.copy_(torch.tensor([0.0, 1e-4]))
    envs.close()
    manager = CheckpointManager(folder / "checkpoints")
    pending = manager.begin(1)
    policy.begin_save(pending.folder)
    pending.commit(policy.finish_save())
    return folder


def test_episodes_are_those_of_a_validation(run):
    episodes = list(play(str(run), num_episodes=3, seed=7, max_frames=100))
    config = new_settings("ppo", overrides=["env.kwargs.max_episode_steps=40"])
    envs, _ = make_envs(config.env, 3)
    policy = ControlPolicy(*spaces_of(envs, config.env.name), config.policy, config.critic)
    policy.load(CheckpointManager(run / "checkpoints").latest().path)
    expected = EpisodeValidator(envs, policy.greedy, policy.device, 7, 100).validate(1, lambda: False).metrics
    envs.close()
    assert sum(episode.reward for episode in episodes) / 3 == pytest.approx(expected["reward"])
    assert sum(episode.length for episode in episodes) / 3 == pytest.approx(expected["length"])
    assert not any(episode.is_cut for episode in episodes)
    assert [episode.is_cut for episode in play(str(run), 1, seed=7, max_frames=3)] == [True]


@pytest.mark.parametrize("suffix", [pytest.param(".mp4", marks=pytest.mark.slow), ".gif"])
def test_a_video_shows_every_frame(run, suffix):
    video = Path(f"episode{suffix}")
    [episode] = play(str(run), num_episodes=1, seed=0, max_frames=8, video=video)
    pictures = imageio.imread(video, index=...) if suffix == ".gif" else imageio.imread(video)
    if suffix == ".gif":  # joins equal pictures
        assert 3 < len(pictures) <= episode.length + 1
    else:
        assert len(pictures) == episode.length + 1
    assert pictures[0].shape == (400, 600, 3)
    assert pictures[0].std() > 1, "not blank"


def test_a_checkpoint_without_optimizer_can_be_played(run):
    manager = CheckpointManager(run / "checkpoints", keep_last=9)
    remove_part(manager, run / "checkpoints/step_1", "optimizer")
    assert len(list(play(str(run / "checkpoints/step_1"), 1, seed=0, max_frames=5))) == 1


@pytest.mark.parametrize(
    ("video", "said"),
    [
        ("episode.avi", r"--video episode\.avi has the suffix '\.avi'; choose \.mp4 or \.gif"),
        ("taken.gif", r"--video taken\.gif exists already"),
        ("nowhere/episode.gif", "the folder nowhere does not exist"),
    ],
)
def test_a_video_that_cannot_be_written_is_refused_at_once(run, video, said):
    Path("taken.gif").touch()
    with pytest.raises(ConfigError, match=said):
        next(play(str(run), 1, 0, 5, Path(video)))


def test_a_missing_package_is_one_sentence(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'--video needs the package imageio; pip install "lucidrl\[pixels\]"'):
        next(play(str(run), 1, 0, 5, Path("episode.gif")))


def test_an_env_without_pictures_is_named_and_leaves_no_video(run, monkeypatch):
    monkeypatch.setattr("gymnasium.envs.classic_control.CartPoleEnv.render", lambda env: None)
    with pytest.raises(EnvironmentFailure, match=r"CartPole.* renders None, not uint8 \[height, width, colour\]"):
        next(play(str(run), 1, 0, 5, Path("episode.gif")))
    assert not Path("episode.gif").exists()


def test_only_runs_of_control_policies_are_played(run, tmp_path):
    text = create_run_folder(new_settings("grpo", overrides=["run.name=text"]))
    with CheckpointManager(text / "checkpoints").saving(1):
        pass
    with pytest.raises(ConfigError, match=r"runs/text is not a run of `lucidrl ppo`; .* `lucidrl generate runs/text`"):
        next(play("runs/text", 1, 0, 5))
    with pytest.raises(ConfigError, match="nowhere is neither a run folder nor a checkpoint"):
        next(play("nowhere", 1, 0, 5))


def test_the_command_prints_returns(lucidrl, run):
    code, output, errors = lucidrl("play", run, "--episodes", 2)
    assert (code, errors) == (0, "")
    *episodes, mean = output.splitlines()
    assert [line.split(":")[0] for line in episodes] == ["episode 1", "episode 2"]
    assert mean.startswith("mean return of 2 episodes: ")
