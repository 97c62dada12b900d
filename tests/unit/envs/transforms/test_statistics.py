"""ObservationNorm and VecNorm against statistics of whole arrays."""

import numpy as np
import pytest
import torch

from lucidrl.envs.transforms import Compose, ObservationNorm, StepCounter, ToTensorImage, TransformedEnv, VecNorm
from lucidrl.errors import CheckpointError, ConfigError
from tests.unit.envs.transforms.toys import SEED, Weather, rollouts


@pytest.mark.parametrize("batch_size", [(), (3,)])
def test_observations_are_moved_and_scaled(batch_size):
    loc, scale = np.array([1.0, 2.0, 3.0]), 0.5
    steps, plain = rollouts(ObservationNorm(loc, scale), batch_size)
    torch.testing.assert_close(steps["observation"], plain["observation"] * 0.5 + torch.tensor(loc).float())
    steps, plain = rollouts(ObservationNorm(loc, scale, standard_normal=True), batch_size)
    expected = (plain["next", "observation"] - torch.tensor(loc).float()) / 0.5
    torch.testing.assert_close(steps["next", "observation"], expected)


@pytest.mark.parametrize("standard_normal", [False, True])
def test_measured_statistics_make_the_same_steps_standard_normal(standard_normal):
    norm = ObservationNorm(in_keys=["observation", "wide", "hour"], standard_normal=standard_normal)
    env = TransformedEnv(Weather((3,)), Compose(StepCounter(), norm))
    env.set_seed(SEED)
    norm.init_stats(200)
    env.set_seed(SEED)
    steps = env.rollout(200, break_when_any_done=False)
    for key in norm.in_keys:
        values = steps[key].flatten(end_dim=1).double()
        torch.testing.assert_close(values.mean(0), torch.zeros_like(values[0]), rtol=0, atol=1e-5)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones_like(values[0]), rtol=1e-4, atol=0)
    assert steps["wide"].dtype == torch.float64
    assert steps["hour"].dtype == torch.float32


def test_images_can_be_measured_by_channel():
    norm = ObservationNorm(in_keys="pixels", standard_normal=True)
    env = TransformedEnv(Weather((3,)), Compose(ToTensorImage(), norm))
    norm.init_stats(10, reduce_dim=(0, -1, -2))
    assert norm.state_dict()["pixels.loc"].shape == (3, 1, 1)
    assert abs(env.rollout(3)["pixels"].mean().item()) < 0.5


def test_a_constant_entry_is_not_divided_by_zero():
    norm = ObservationNorm(in_keys=["hour"])
    env = TransformedEnv(Weather(), norm)
    norm.init_stats(1)
    assert env.rollout(2)["hour"].isfinite().all()


def test_a_norm_without_statistics_says_how_to_get_them():
    norm = ObservationNorm()
    with pytest.raises(ConfigError, match="put it into a TransformedEnv"):
        norm.init_stats(3)
    env = TransformedEnv(Weather(), norm)
    with pytest.raises(ConfigError, match=r"no loc and scale for 'observation'.*init_stats"):
        env.reset()


def test_measured_statistics_load_into_another_env():
    norm, other = ObservationNorm(), ObservationNorm()
    env, others = TransformedEnv(Weather(), norm), TransformedEnv(Weather(), other)
    norm.init_stats(20)
    other.load_state_dict(norm.state_dict())
    first, second = (each.set_seed(SEED) and each.rollout(3) for each in (env, others))
    assert (first == second).all()
    with pytest.raises(CheckpointError, match=r"no observation\.loc"):
        other.load_state_dict({"observation.scale": 1.0})


def decayed(batches, decay):
    """Mean and variance of all values so far, after every batch, each weighed by how long ago it came."""
    found = []
    for end in range(1, len(batches) + 1):
        weights = np.concatenate([np.full(len(batch), decay ** (end - 1 - t)) for t, batch in enumerate(batches[:end])])
        values = np.concatenate(batches[:end])
        mean = np.average(values, axis=0, weights=weights)
        variance = np.average((values - mean) ** 2, axis=0, weights=weights)
        found.append((mean, variance))
    return found


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("batch_size", [(), (3,), (2, 2)])
def test_running_statistics_are_those_of_all_frames_so_far(batch_size, decay):
    norm = VecNorm(["observation", "reward"], decay=decay, eps=1e-3)
    steps, plain = rollouts(norm, batch_size)
    num_dims = len(batch_size)
    time_first = {
        part: plain[key].movedim(num_dims, 0).double().numpy()
        for part, key in (("root", "observation"), ("next", ("next", "observation")), ("reward", ("next", "reward")))
    }
    done = plain["next", "done"].movedim(num_dims, 0)[..., 0].numpy()
    batches, taken = [time_first["root"][0].reshape(-1, 3)], []
    for time, ends in enumerate(done):
        batches.append(time_first["next"][time].reshape(-1, 3))
        taken.append(len(batches) - 1)
        if ends.any() and time + 1 < len(done):
            batches.append(time_first["root"][time + 1][ends].reshape(-1, 3))
    statistics = decayed(batches, decay)
    got = steps["next", "observation"].movedim(num_dims, 0)
    for time, place in enumerate(taken):
        mean, variance = statistics[place]
        expected = (time_first["next"][time] - mean) / np.sqrt(variance + 1e-3)
        np.testing.assert_allclose(got[time], expected, rtol=1e-4, atol=1e-5)
    rewards = decayed([reward.reshape(-1, 1) for reward in time_first["reward"]], decay)
    expected = [(r - m) / np.sqrt(v + 1e-3) for r, (m, v) in zip(time_first["reward"], rewards, strict=True)]
    np.testing.assert_allclose(steps["next", "reward"].movedim(num_dims, 0), expected, rtol=1e-4, atol=1e-5)


def test_a_frozen_copy_keeps_the_learned_statistics():
    norm = VecNorm()
    env = TransformedEnv(Weather((3,)), norm)
    env.rollout(20, break_when_any_done=False)
    frozen = norm.frozen_copy()
    state = frozen.state_dict()
    steps, plain = rollouts(frozen)
    np.testing.assert_equal(frozen.state_dict(), state)
    mean = torch.from_numpy(state["observation.mean"])
    variance = torch.from_numpy(state["observation.squares"]) / state["observation.weight"]
    expected = (plain["observation"] - mean) / (variance + norm.eps).sqrt()
    torch.testing.assert_close(steps["observation"], expected.float())
    before = norm.state_dict()["observation.weight"]
    env.rollout(1)
    assert norm.state_dict()["observation.weight"] == before + 6, "the original goes on learning"


def test_learned_statistics_go_on_after_they_are_loaded():
    norm, other = VecNorm(decay=0.99), VecNorm(decay=0.99)
    env, others = TransformedEnv(Weather((2,)), norm), TransformedEnv(Weather((2,)), other)
    env.rollout(10, break_when_any_done=False)
    other.load_state_dict(norm.state_dict())
    first, second = (each.set_seed(SEED) and each.rollout(5, break_when_any_done=False) for each in (env, others))
    assert (first == second).all()
    np.testing.assert_equal(other.state_dict(), norm.state_dict())
    with pytest.raises(CheckpointError, match=r"observation of shape \[2\], but here it is \[3\]"):
        other.load_state_dict({"observation.weight": 1.0, "observation.mean": [0, 0], "observation.squares": [1, 1]})
    mixed = VecNorm(["wide"])
    mixed.load_state_dict({name.replace("observation", "wide"): value for name, value in norm.state_dict().items()})
    with pytest.raises(ConfigError, match=r"learned 'wide' of shape \[3\], but the env has \[2\]"):
        TransformedEnv(Weather(), mixed)


def test_variance_survives_values_far_from_zero():
    class Far(Weather):
        def _drawn(self):
            drawn = super()._drawn()
            return drawn | {"wide": drawn["wide"] + 1e8}

    norm = VecNorm(["wide"])
    env = TransformedEnv(Far(), norm)
    steps = env.rollout(500, break_when_any_done=False)
    assert 0.8 < steps["next", "wide"][100:].std().item() < 1.2


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: ObservationNorm(1.0), "give both, or neither"),
        (lambda: ObservationNorm(0.0, 0.0), "of 'observation' must be finite"),
        (lambda: VecNorm(decay=0), "decay=0"),
        (lambda: VecNorm(eps=0), "eps=0"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(make, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make()
