"""CatFrames and CatTensors against plain lists of observations."""

import numpy as np
import pytest
import torch

from lucidrl.envs.specs import Bounded, Unbounded
from lucidrl.envs.transforms import CatFrames, CatTensors, Compose, StepCounter, ToTensorImage, TransformedEnv
from lucidrl.errors import ConfigError
from tests.unit.envs.transforms.toys import NUM_STEPS, Weather, rollouts


def stacked(plain, key, row, number, axis, padding):
    """The last `number` values of one env at every root and every next, from its own episode alone."""
    roots, nexts = [], []
    for time in range(NUM_STEPS):
        value = plain[key][row][time].numpy()
        if time == 0 or plain["next", "done"][row][time - 1]:
            before = value if padding == "same" else np.zeros_like(value)
            latest = [before] * (number - 1) + [value]
        roots.append(np.concatenate(latest, axis))
        latest = [*latest[1:], plain["next", key][row][time].numpy()]
        nexts.append(np.concatenate(latest, axis))
    return np.stack(roots), np.stack(nexts)


@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize(("key", "dim"), [("observation", -1), ("pixels", -3), ("pixels", -1)])
def test_frames_are_those_of_the_envs_own_episode(key, dim, padding):
    steps, plain = rollouts(CatFrames(3, dim, [key], padding=padding), (4,))
    for row in range(4):
        roots, nexts = stacked(plain, key, row, 3, dim, padding)
        np.testing.assert_array_equal(steps[key][row], roots)
        np.testing.assert_array_equal(steps["next", key][row], nexts)


def test_frames_of_a_single_env_can_be_kept_beside_the_entry():
    steps, plain = rollouts(CatFrames(2, -1, ["observation"], ["latest"]))
    assert (steps["observation"] == plain["observation"]).all()
    assert steps["latest"].shape == (NUM_STEPS, 6)
    assert (steps["latest"][..., 3:] == plain["observation"]).all()


def test_limits_of_frames_include_the_padding():
    env = TransformedEnv(Weather(), Compose(ToTensorImage(), CatFrames(2, -3, padding="constant", padding_value=-1)))
    assert env.observation_spec["pixels"] == Bounded(-1, 1, (6, 6, 4))
    assert env.observation_spec["pixels"].is_in(env.reset()["pixels"])


@pytest.mark.parametrize("batch_size", [(), (3,)])
def test_entries_are_put_side_by_side_and_removed(batch_size):
    steps, plain = rollouts(CatTensors([("sky", "cloud"), "hour", "observation"]), batch_size)
    for part, expected in ((steps, plain), (steps["next"], plain["next"])):
        values = [expected["sky", "cloud"], expected["hour"].unsqueeze(-1), expected["observation"]]
        assert part["observation_vector"].dtype == torch.float32
        assert (part["observation_vector"] == torch.cat(values, -1)).all()
        assert not {"hour", "observation", ("sky", "cloud")} & set(part.keys(include_nested=True, leaves_only=True))


def test_entries_can_be_kept_and_one_of_them_written():
    steps, plain = rollouts(CatTensors(["observation", ("sky", "cloud")], "observation", del_keys=False), (3,))
    assert (steps["observation"] == torch.cat([plain["observation"], plain["sky", "cloud"]], -1)).all()
    assert (steps["sky", "cloud"] == plain["sky", "cloud"]).all()


def test_limits_are_put_side_by_side_where_all_have_them():
    env = TransformedEnv(Weather(), Compose(StepCounter(), CatTensors(["wide", "step_count"], "all", del_keys=False)))
    assert isinstance(env.observation_spec["all"], Bounded)
    assert env.observation_spec["all"].low.tolist() == [-1, -1, 0]
    assert env.observation_spec["all"].dtype == torch.float64
    mixed = TransformedEnv(Weather(), CatTensors(["wide", "observation"]))
    assert mixed.observation_spec["observation_vector"] == Unbounded((5,), torch.float64)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: CatFrames(0, -1, ["observation"]), "N=0"),
        (lambda: CatFrames(2, 0, ["observation"]), "dim=0 would depend"),
        (lambda: CatFrames(2, -2, ["observation"]), "dim=-2 is not a dim of 'observation'"),
        (lambda: CatFrames(2, -1, ["observation"], padding="zeros"), "'same' or 'constant'"),
        (lambda: CatTensors([]), "in_keys is empty"),
        (lambda: CatTensors(["wide", "hour"], dim=0), "dim=0 would depend"),
        (lambda: CatTensors(["wide", "pixels"]), "cannot concatenate 'wide' "),
        (lambda: CatTensors(["wide", ("sky", "cloud")], "observation"), "which the env already has"),
    ],
)
def test_entries_that_cannot_be_concatenated_are_refused(make, complaint):
    with pytest.raises(ConfigError, match=complaint):
        TransformedEnv(Weather((3,)), make())
