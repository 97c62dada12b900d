"""Transforms of rewards, dtypes and images against plain arithmetic."""

import numpy as np
import pytest
import torch

from lucidrl.envs.arrays import Arrays, Frame
from lucidrl.envs.base import EnvBase
from lucidrl.envs.checks import check_env_specs
from lucidrl.envs.specs import Bounded, Composite, Unbounded
from lucidrl.envs.transforms import (
    Compose,
    DoubleToFloat,
    GrayScale,
    Resize,
    RewardClipping,
    RewardScaling,
    RewardSum,
    ToTensorImage,
    TransformedEnv,
)
from lucidrl.errors import ConfigError
from tests.unit.envs.transforms.toys import Weather, rollouts

BATCHES = [(), (3,)]


@pytest.mark.parametrize("batch_size", BATCHES)
def test_rewards_are_scaled(batch_size):
    steps, plain = rollouts(RewardScaling(loc=0.5, scale=-2.0), batch_size)
    torch.testing.assert_close(steps["next", "reward"], plain["next", "reward"] * -2 + 0.5)
    steps, plain = rollouts(RewardScaling(loc=0.5, scale=2.0, standard_normal=True), batch_size)
    torch.testing.assert_close(steps["next", "reward"], (plain["next", "reward"] - 0.5) / 2)


def test_rewards_are_clipped_and_their_spec_has_the_limits():
    steps, plain = rollouts(RewardClipping(-0.5, 2), (3,))
    assert (steps["next", "reward"] == plain["next", "reward"].clamp(-0.5, 2)).all()
    assert TransformedEnv(Weather(), RewardClipping(-0.5, 2)).reward_spec == Bounded(-0.5, 2, (1,))
    steps, plain = rollouts(RewardClipping(clamp_max=0), (3,))
    assert (steps["next", "reward"] == plain["next", "reward"].clamp(max=0)).all()


def test_a_reward_sum_adds_transformed_rewards():
    steps, plain = rollouts(Compose(RewardSum("raw"), RewardClipping(-1, 1), RewardSum("clipped")))
    first = plain["next", "reward"][0, 0]
    assert steps["next", "raw"][0, 0] == first
    assert steps["next", "clipped"][0, 0] == first.clamp(-1, 1)
    assert (steps["next", "raw"] != steps["next", "clipped"]).any()


@pytest.mark.parametrize("batch_size", BATCHES)
def test_doubles_become_floats(batch_size):
    steps, plain = rollouts(DoubleToFloat(), batch_size)
    assert plain["wide"].dtype == torch.float64
    for part, expected in ((steps, plain), (steps["next"], plain["next"])):
        assert part["wide"].dtype == torch.float32
        assert (part["wide"] == expected["wide"].float()).all()
        assert (part["observation"] == expected["observation"]).all()


class Exact(EnvBase):
    """Takes float64 actions within narrow limits, and observes the last action."""

    LIMIT = 0.1  # the nearest float32 lies beyond it

    def __init__(self, *, several: bool = False):
        super().__init__()
        self.observation_spec = Composite(last=Unbounded((1,), torch.float64))
        limits = Bounded(-self.LIMIT, self.LIMIT, (1,), torch.float64)
        self.action_spec = Composite(turn=limits, push=Unbounded((1,))) if several else limits
        self._key = ("action", "turn") if several else "action"

    def _set_seed(self, seed: int) -> None: ...

    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        out.observation["last"].fill(0)

    def _step_into(self, actions: Arrays, out: Frame) -> None:
        assert self.action_leaves()[self._key].contains(actions[self._key])
        out.observation["last"][...] = actions[self._key]
        out.reward.fill(0)
        out.clear_flags()


@pytest.mark.parametrize("several", [False, True])
def test_float_actions_reach_an_env_that_wants_doubles_within_its_limits(several):
    env = TransformedEnv(Exact(several=several), DoubleToFloat())
    check_env_specs(env)
    root = env.rand_action(env.reset())
    key = ("action", "turn") if several else "action"
    root[key] = torch.full((1,), Exact.LIMIT)
    assert root[key].double().item() > Exact.LIMIT
    assert env.action_leaves()[key].is_in(root[key])
    assert env.step(root)["next", "last"].item() == np.float32(Exact.LIMIT)


@pytest.mark.parametrize("batch_size", BATCHES)
def test_images_become_floats_with_channels_first(batch_size):
    steps, plain = rollouts(ToTensorImage(), batch_size)
    expected = plain["pixels"].movedim(-1, -3) / 255
    assert expected.shape[-3:] == (3, 6, 4)
    torch.testing.assert_close(steps["pixels"], expected)
    assert TransformedEnv(Weather(), ToTensorImage()).observation_spec["pixels"] == Bounded(0, 1, (3, 6, 4))


def test_colours_become_brightness():
    steps, plain = rollouts(Compose(ToTensorImage(), GrayScale()), (3,))
    red, green, blue = (plain["pixels"] / 255).unbind(-1)
    torch.testing.assert_close(steps["pixels"], (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(-3))


@pytest.mark.parametrize("batch_size", BATCHES)
def test_images_are_resized(batch_size):
    steps, plain = rollouts(Compose(ToTensorImage(), Resize(w=2, h=3, interpolation="area")), batch_size)
    pixels = plain["pixels"].movedim(-1, -3) / 255
    blocks = pixels.unflatten(-1, (2, 2)).unflatten(-3, (3, 2)).mean((-1, -3))
    assert blocks.shape[-3:] == (3, 3, 2)
    torch.testing.assert_close(steps["pixels"], blocks)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_resized_images_do_not_depend_on_their_neighbours(interpolation):
    images = (
        np.random.default_rng(0).random((4, 3, 6, 4), np.float32) * np.arange(4, dtype=np.float32)[:, None, None, None]
    )
    resize = Resize(5, 7, interpolation)
    together = resize.forward(images)
    assert together.shape == (4, 3, 7, 5)
    np.testing.assert_array_equal(together, np.stack([resize.forward(image) for image in images]))


@pytest.mark.parametrize(
    ("transform", "complaint"),
    [
        (lambda: GrayScale(), "put ToTensorImage before it"),
        (lambda: Resize(4), "put ToTensorImage before it"),
        (lambda: Compose(ToTensorImage(), GrayScale(), GrayScale()), "1 channels"),
        (lambda: ToTensorImage(["observation"]), "it needs uint8 images"),
        (lambda: Resize(0), "w=0"),
        (lambda: Resize(4, interpolation="cubic"), "nearest, bilinear, bicubic or area"),
        (lambda: RewardScaling(0, 0), "scale=0"),
        (lambda: RewardClipping(1, 1), "clamp_min=1 must be below clamp_max=1"),
        (lambda: DoubleToFloat(["observation"]), "converts float64, but 'observation' is torch.float32; remove"),
    ],
)
def test_entries_that_cannot_be_transformed_are_refused(transform, complaint):
    with pytest.raises(ConfigError, match=complaint):
        TransformedEnv(Weather(), transform())
