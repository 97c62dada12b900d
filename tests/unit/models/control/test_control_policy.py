"""Policy and critic: acting, separate training, skipped nonfinite steps, saving and loading."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.errors import CheckpointError, ConfigError, TrainingError
from lucidrl.losses.interfaces import Frames
from lucidrl.losses.policy_gradient import ClippedFrameLoss
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.models.control.interfaces import ContinuousActions, DiscreteActions, ObservationSpace
from lucidrl.models.control.policy import ControlPolicy

PENDULUM = ContinuousActions(torch.tensor([-2.0]), torch.tensor([2.0]))
LOSS = ClippedFrameLoss(clip=0.2, entropy_coefficient=0.0)


def make_policy(actions=None, policy=None, critic=None, shape=(3,)) -> ControlPolicy:
    torch.manual_seed(0)
    return ControlPolicy(
        ObservationSpace(shape),
        actions or DiscreteActions(2),
        ControlPolicyConfig(**(policy or {})),
        CriticConfig(**(critic or {})),
    )


def make_frames(policy: ControlPolicy, count: int = 64, shape=(3,)) -> Frames:
    observations = torch.randn(count, *shape)
    acted = policy.network(observations)
    values = policy.values(observations)
    return Frames(
        observations, acted["latent_action"], acted["sample_log_prob"], values, torch.randn(count), torch.randn(count)
    )


def weights_of(policy: ControlPolicy) -> dict[str, torch.Tensor]:
    networks = {"policy": policy.network, "critic": policy.critic}
    return {f"{role}.{k}": v.clone() for role, network in networks.items() for k, v in network.state_dict().items()}


def train(policy: ControlPolicy, frames: Frames, **options):
    return policy.train(frames, LOSS, **{"num_epochs": 2, "minibatch_frames": 16, **options})


@pytest.mark.parametrize("actions", [DiscreteActions(2), PENDULUM])
def test_a_fresh_policy_is_close_to_uniform_for_every_observation(actions):
    policy = make_policy(actions)
    frames = make_frames(policy, 500)
    if isinstance(actions, DiscreteActions):
        assert policy.score(frames).entropy.min().item() > 0.69
    assert float(policy.greedy(frames.observations).float().abs().max()) <= 1


def test_scores_of_sampled_actions_equal_their_sample_logprobs():
    for actions in (DiscreteActions(4), PENDULUM):
        policy = make_policy(actions, shape=(2, 3))
        frames = make_frames(policy, shape=(2, 3))
        torch.testing.assert_close(policy.score(frames).logprobs, frames.logprobs)


def test_one_epoch_makes_one_step_per_minibatch_and_trains_both_networks():
    policy = make_policy()
    before = weights_of(policy)
    result = train(policy, make_frames(policy), num_epochs=1)
    assert {name for name, value in weights_of(policy).items() if not value.equal(before[name])} == set(before)
    assert result.num_skipped_steps == 0
    assert result.metrics.keys() >= {"loss_policy", "loss_value", "entropy", "approx_kl", "clip_fraction"}
    assert result.metrics.keys() >= {"grad_norm", "critic_grad_norm", "learning_rate", "critic_learning_rate"}
    steps = policy._roles[0].optimizer.state_dict()["optimizer"]["state"][0]["step"]
    assert int(steps) == 64 // 16


def test_the_learning_rate_of_each_role_follows_its_own_schedule():
    anneal = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 1.0, "end_factor": 0.5}}
    policy = make_policy(policy={"scheduler": [{**anneal, "kwargs": {**anneal["kwargs"], "total_iters": 2}}]})
    frames = make_frames(policy)
    rates = [train(policy, frames).metrics for _ in range(3)]
    assert [metrics["learning_rate"] for metrics in rates] == pytest.approx([3e-4, 2.25e-4, 1.5e-4])
    assert [metrics["critic_learning_rate"] for metrics in rates] == pytest.approx([3e-4] * 3)


def test_a_nonfinite_step_is_skipped_and_counted_for_that_role_only():
    policy = make_policy()
    frames = make_frames(policy, 16)
    before = weights_of(policy)
    frames.advantages[3] = torch.nan
    result = train(policy, frames, num_epochs=1)
    assert result.num_skipped_steps == 1
    changed = {name for name, value in weights_of(policy).items() if not value.equal(before[name])}
    assert changed == {name for name in before if name.startswith("critic.")}


def test_too_many_consecutive_skipped_steps_raise_and_name_the_role():
    policy = make_policy(critic={"max_nonfinite_steps": 3})
    frames = make_frames(policy)
    frames.value_targets[:] = torch.inf
    with pytest.raises(TrainingError, match=r"gradients of the critic were NaN or infinite in 3 .*critic\.optimizer"):
        train(policy, frames)


def test_the_skip_counter_resets_after_a_good_step_and_survives_a_resume():
    policy = make_policy(critic={"max_nonfinite_steps": 2})
    good = make_frames(policy, 16)
    bad = replace(good, value_targets=torch.full((16,), torch.inf))
    for frames in (bad, good, bad):
        train(policy, frames, num_epochs=1)
    resumed = make_policy(critic={"max_nonfinite_steps": 2})
    resumed.load_state_dict(policy.state_dict())
    with pytest.raises(TrainingError, match="in 2 optimizer steps"):
        train(resumed, bad, num_epochs=1)


def test_every_epoch_shuffles_all_frames():
    policy = make_policy()
    frames = make_frames(policy)
    seen: list[torch.Tensor] = []

    def loss(outputs, minibatch):
        seen.append(minibatch.advantages)
        return LOSS(outputs, minibatch)

    policy.train(frames, loss, num_epochs=2, minibatch_frames=16)
    first, second = torch.cat(seen[:4]), torch.cat(seen[4:])
    assert first.sort().values.equal(frames.advantages.sort().values)
    assert second.sort().values.equal(first.sort().values)
    assert not first.equal(second)


def test_an_unknown_optimizer_is_named_with_its_role():
    with pytest.raises(ConfigError, match=r"critic\.optimizer\.name='torch\.optim\.Adm'"):
        make_policy(critic={"optimizer": {"name": "torch.optim.Adm"}})


def save(policy: ControlPolicy, root) -> CheckpointManager:
    manager = CheckpointManager(root)
    pending = manager.begin(1)
    policy.begin_save(pending.folder)
    train(policy, make_frames(policy))  # the save holds the state at its start
    pending.commit(policy.finish_save())
    return manager


MUON = {"name": "muon", "kwargs": {"lr": 1e-3}, "groups": [{"pattern": "*layers.0.*", "lr": 1e-4}]}


@pytest.mark.parametrize("own", [{}, {"optimizer": MUON}], ids=["adam", "muon"])
def test_a_loaded_policy_resumes_bit_exactly(tmp_path, own):
    policy = make_policy(PENDULUM, policy=own)
    train(policy, make_frames(policy))
    saved, state = weights_of(policy), policy.state_dict()
    folder = save(policy, tmp_path).latest().path
    assert {path.parent.name for path in folder.rglob("*.safetensors")} == {"policy", "critic", "optimizer"}

    loaded = make_policy(PENDULUM, policy=own)
    loaded.load(folder)
    loaded.load_state_dict(state)
    assert all(value.equal(saved[name]) for name, value in weights_of(loaded).items())
    again = make_policy(PENDULUM, policy=own)
    train(again, make_frames(again))
    torch.manual_seed(5)
    frames = make_frames(loaded)
    for each in (loaded, again):
        torch.manual_seed(6)
        train(each, frames)
    assert all(value.equal(weights_of(again)[name]) for name, value in weights_of(loaded).items())


def test_networks_of_another_size_are_refused_and_nothing_is_loaded(tmp_path):
    folder = save(make_policy(), tmp_path).latest().path
    other = make_policy(critic={"hidden_sizes": [64, 32]})
    before = weights_of(other)
    with pytest.raises(CheckpointError, match=r"another network: body.*critic\.hidden_sizes"):
        other.load(folder)
    assert all(value.equal(before[name]) for name, value in weights_of(other).items())


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    folder = save(make_policy(), tmp_path).latest().path
    other = make_policy(policy={"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}})
    with pytest.raises(CheckpointError, match=r"policy's Adam without a scheduler, but SGD without a scheduler is"):
        other.load(folder)
    other = make_policy(critic={"scheduler": [{"name": "torch.optim.lr_scheduler.LinearLR"}]})
    with pytest.raises(CheckpointError, match=r"Adam with a scheduler is configured; resume with the critic\.optim"):
        other.load(folder)
