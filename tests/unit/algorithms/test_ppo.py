"""PPO runs of a few steps in a real run folder: they learn, record, and go on where they were stopped."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from lucidrl.algorithms.advantages import generalized_advantages
from lucidrl.algorithms.config import PPOConfig
from lucidrl.algorithms.ppo import PPO, explained_variance
from lucidrl.algorithms.validation import EpisodeValidator
from lucidrl.errors import CheckpointError, ConfigError, TrainingError
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.models.control.interfaces import DiscreteActions, ObservationSpace
from lucidrl.models.control.policy import ControlPolicy
from lucidrl.recipes.configs import ControlEnvConfig, PPORunConfig
from lucidrl.recipes.control import make_envs, spaces_of
from lucidrl.recipes.run import train
from lucidrl.recipes.settings import preset_path
from lucidrl.utils.config import dump_yaml, load_config
from tests.faults.records import digests, metrics
from tests.unit.algorithms.conftest import RunFolder, Watcher

CONTROL_PAGE = Path(__file__).parents[3] / "docs" / "control.md"
SMALL = {
    "num_threads": 1,
    "env": {"num_envs": 2},
    "collector": {"frames_per_batch": 64},
    "ppo": {"max_steps": 4, "minibatch_frames": 32, "num_epochs": 2},
    "policy": {"hidden_sizes": [8], "scheduler": {"name": "torch.optim.lr_scheduler.LinearLR"}},
    "critic": {"hidden_sizes": [8]},
    "validation": {"num_episodes": 3, "every": 2},
    "checkpoint": {"every": 0},
    "tracking": {"tensorboard": False, "monitor": False},
}
RECORDED = {
    *("loss_policy", "loss_value", "entropy", "approx_kl", "clip_fraction", "explained_variance"),
    *("grad_norm", "learning_rate", "critic_grad_norm", "critic_learning_rate", "skipped_optimizer_steps"),
    *("episode_reward", "episode_length", "frames"),
}


@pytest.fixture
def ppo(tmp_path):
    """ppo("folder", *overrides, interrupt_at=…, die_at=…, resume=…) → the folder and the last step."""

    def start(name, *overrides, interrupt_at=None, die_at=None, resume=False):
        torch.seed()  # nothing may depend on what ran before in this process
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        watcher = Watcher(interrupt_at, die_at)
        config = load_config(PPORunConfig, SMALL, overrides=overrides)
        last_step = train(config, folder, watcher, resume)
        return RunFolder(folder, watcher), last_step

    return start


def learn(folder, *overrides):
    """Greedy reward by step of a run with a preset."""

    class Rewards(Watcher):
        def on_validation(self, step, metrics):
            found[step] = metrics["reward"]

    found: dict[int, float] = {}
    quiet = ("tracking.tensorboard=false", "tracking.monitor=false")
    train(load_config(PPORunConfig, preset_path("cartpole"), overrides=[*quiet, *overrides]), folder, Rewards())
    return found


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_stopped_and_resumed_run_is_bit_identical_to_an_uninterrupted_run(ppo, env):
    name = f"env.name={env}"
    whole, _ = ppo("whole", name)
    broken, last_step = ppo("broken", name, interrupt_at=2)
    assert last_step == 2
    broken, last_step = ppo("broken", name, resume=True)
    assert last_step == 4
    assert metrics(broken.path) == metrics(whole.path)
    assert digests(broken.path) == digests(whole.path)
    assert min(whole.train_metric("grad_norm")) > 0
    assert not [message for message in broken.watcher.messages if message.startswith("resuming")]


@pytest.mark.slow
def test_a_run_that_died_after_a_checkpoint_ends_as_an_uninterrupted_run(ppo):
    settings = ("env.name=Acrobot-v1", "checkpoint.every=1")
    whole, _ = ppo("whole", *settings)
    with pytest.raises(RuntimeError, match="died"):
        ppo("broken", *settings, die_at=3)
    broken, _ = ppo("broken", *settings, resume=True)
    assert digests(broken.path) == digests(whole.path)


def test_the_same_seed_gives_the_same_run_and_another_one_another(ppo):
    first, again, other = (ppo(f"run {n}", f"seed={seed}")[0] for n, seed in enumerate((7, 7, 8)))
    assert digests(first.path) == digests(again.path)
    assert digests(first.path)["parameters"] != digests(other.path)["parameters"]


@pytest.mark.parametrize("normalize", [True, False])
def test_frames_are_prepared_with_advantages_of_the_critic_on_what_followed(normalize):
    torch.manual_seed(0)
    policy = ControlPolicy(ObservationSpace((3,)), DiscreteActions(2), ControlPolicyConfig(), CriticConfig())
    seen, followed, rewards = torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.randn(2, 4, 1)
    terminated = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]]).bool().unsqueeze(-1)
    truncated = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0]]).bool().unsqueeze(-1)
    after = {"observation": followed, "reward": rewards, "terminated": terminated, "done": terminated | truncated}
    batch = TensorDict({"observation": seen, **policy.network(seen), "next": TensorDict(after, [2, 4])}, [2, 4])
    unused: Any = None
    config = PPOConfig(normalize_advantages=normalize)
    loop = PPO(config, unused, policy, *[unused] * 3)
    frames = loop.prepare(batch)

    values, next_values = policy.values(seen), policy.values(followed)
    flags = (terminated.squeeze(-1), (terminated | truncated).squeeze(-1))
    options = {"discount": config.discount, "gae_lambda": config.gae_lambda}
    expected = generalized_advantages(rewards.squeeze(-1), values, next_values, *flags, **options)
    raw = expected.advantages.flatten()
    wanted = (raw - raw.mean()) / raw.std(correction=0) if normalize else raw
    torch.testing.assert_close(frames.advantages, wanted)
    torch.testing.assert_close(frames.value_targets, expected.value_targets.flatten())
    assert frames.observations.equal(seen.flatten(0, 1))
    assert frames.logprobs.equal(batch["sample_log_prob"].flatten())


def test_explained_variance_is_1_for_perfect_values_and_0_for_a_constant():
    targets = torch.tensor([1.0, 2.0, 6.0])
    assert explained_variance(targets, targets) == 1
    assert explained_variance(torch.ones(3), targets) == pytest.approx(0)
    assert explained_variance(targets / 2, targets) == pytest.approx(0.75)


def test_every_step_records_what_happened(ppo):
    folder, _ = ppo("run", "checkpoint.every=2")
    assert folder.train_metric("frames") == [64.0, 128.0, 192.0, 256.0]
    for line in [line for line in folder.lines() if "train/frames" in line]:
        values = {name.removeprefix("train/"): value for name, value in line.items() if name.startswith("train/")}
        assert values.keys() >= RECORDED
        assert all(math.isfinite(value) for value in values.values())
    validated = [line for line in folder.lines() if "validation/reward" in line]
    assert [line["step"] for line in validated] == [0, 2, 4]
    # A pole that is kept up earns one for each frame.
    assert all(line["validation/reward"] == line["validation/length"] for line in validated)
    assert folder.watcher.messages == ["saved step 2", "saved step 4"]


def test_validation_plays_the_same_episodes_every_time(ppo):
    folder, _ = ppo("run", "policy.optimizer.kwargs={lr: 1.0e-30}")
    assert len({line["validation/reward"] for line in folder.lines() if "validation/reward" in line}) == 1


def test_a_stop_skips_the_validation_and_a_resume_makes_up_for_it(ppo):
    whole, _ = ppo("whole")
    stopped, _ = ppo("run", interrupt_at=2)
    assert stopped.watcher.validated == [0]
    resumed, _ = ppo("run", resume=True)
    assert resumed.watcher.validated == [2, 4]
    assert metrics(resumed.path) == metrics(whole.path)


def test_a_stop_ends_the_episodes_of_a_validation():
    env, _ = make_envs(ControlEnvConfig(), num_envs=2)
    with env:
        policy = ControlPolicy(*spaces_of(env, "CartPole-v1"), ControlPolicyConfig(), CriticConfig())
        validator = EpisodeValidator(env, policy.greedy, policy.device, seed=0, max_episode_frames=500)
        assert validator.validate(1, is_stopped=lambda: True).metrics["length"] == 1


def test_validation_can_be_left_out_and_an_endless_episode_counts_as_far_as_it_came(ppo):
    without, _ = ppo("without", "validation.num_episodes=0", "checkpoint.metric=null")
    assert not [line for line in without.lines() if "validation/reward" in line]
    cut, _ = ppo("cut", "validation.max_episode_frames=5")
    assert {line["validation/length"] for line in cut.lines() if "validation/length" in line} == {5.0}


def test_a_metric_that_validation_does_not_measure_is_refused_before_training(ppo):
    with pytest.raises(ConfigError, match=r"checkpoint\.metric='accuracy' is not a validation metric.*length, reward"):
        ppo("run", "checkpoint.metric=accuracy")


def test_rewards_beyond_all_numbers_stop_the_run_with_the_role_that_they_broke(ppo):
    with pytest.raises(TrainingError, match="gradients of the critic were NaN or infinite in 5 optimizer steps"):
        ppo("run", "ppo.num_epochs=5", "critic.optimizer.kwargs={lr: 1.0e+38}", "critic.activation=relu")


def test_weights_can_be_saved_alone_and_then_a_resume_is_refused(ppo):
    folder, _ = ppo("run", "ppo.max_steps=1", "checkpoint.weights_only=true")
    saved = {path.parent.name for path in (folder.path / "checkpoints").rglob("*.safetensors")}
    assert saved == {"policy", "critic"}
    with pytest.raises(CheckpointError, match=r"checkpoint\.weights_only=true"):
        ppo("run", resume=True)


def test_a_resume_with_other_envs_or_networks_is_refused(ppo, tmp_path):
    ppo("run", "ppo.max_steps=1")
    with pytest.raises(CheckpointError, match=r"saved with env\.num_envs=2, not 4"):
        ppo("run", "env.num_envs=4", resume=True)
    settings = (tmp_path / "run/hyperparams.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"policy\.hidden_sizes"):
        ppo("run", "policy.hidden_sizes=[9]", resume=True)
    assert (tmp_path / "run/hyperparams.json").read_bytes() == settings


def test_own_networks_train_and_resume_bit_exactly(ppo, tmp_path, monkeypatch):
    (tmp_path / "ppo_test_nets.py").write_text(
        "from torch import nn\n"
        "def actor(observation_shape, action_shape, width):\n"
        "    first, last = nn.Linear(observation_shape[0], width), nn.Linear(width, action_shape[0])\n"
        "    return nn.Sequential(first, nn.ReLU(), last)\n"
        "def critic(observation_shape, action_shape):\n"
        "    return nn.Linear(observation_shape[0], 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ["policy.network=ppo_test_nets:actor", "policy.network_kwargs={width: 5}"]
    own.append("critic.network=ppo_test_nets:critic")
    whole, _ = ppo("whole", *own)
    ppo("run", *own, interrupt_at=2)
    resumed, _ = ppo("run", *own, resume=True)
    assert metrics(resumed.path) == metrics(whole.path)
    saved = [(path / "checkpoints/step_4/policy/model.safetensors").read_bytes() for path in (whole.path, resumed.path)]
    assert saved[0] == saved[1]


@pytest.mark.parametrize(
    ("name", "shape", "num_actions"),
    [("CartPole-v1", (4,), 2), ("FrozenLake-v1", (16,), 4), ("MountainCarContinuous-v0", (2,), None)],
)
def test_networks_fit_the_spaces_of_the_env(name, shape, num_actions):
    env, _ = make_envs(ControlEnvConfig(name=name), num_envs=2)
    with env:
        observations, actions = spaces_of(env, name)
    assert observations.shape == shape
    if num_actions is None:
        assert actions.low.tolist() == [-1.0]
    else:
        assert actions.n == num_actions


def test_the_page_on_control_shows_a_program_that_plays_a_trained_policy(ppo, monkeypatch, tmp_path, capsys):
    ppo("exp", "ppo.max_steps=1")
    folder = tmp_path / "runs/ppo/exp_001"
    folder.parent.mkdir(parents=True)
    (tmp_path / "exp").rename(folder)
    (folder / "config.yaml").write_text(dump_yaml(load_config(PPORunConfig, SMALL)))
    monkeypatch.chdir(tmp_path)
    _, program = re.findall(r"```python\n(.*?)```", CONTROL_PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(program, {})
    assert float(capsys.readouterr().out.removeprefix("reward ")) >= 1


@pytest.mark.slow
def test_cartpole_is_learned_in_seconds(tmp_path):
    found = learn(tmp_path, "ppo.max_steps=6", "validation.every=0")
    assert found[0] < 50
    assert found[6] > 150


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_is_solved_with_every_seed(tmp_path, seed):
    found = learn(tmp_path, f"seed={seed}")
    assert found[max(found)] >= 475


def test_a_resume_with_another_number_of_envs_is_refused(ppo):
    ppo("run", "ppo.max_steps=1")
    with pytest.raises(CheckpointError, match=r"env\.num_envs=2, not 4; resume with env\.num_envs=2"):
        ppo("run", "env.num_envs=4", resume=True)
