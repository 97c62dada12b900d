"""ActionMask: what is drawn, what is accepted, what is refused."""

import numpy as np
import pytest
import torch

from lucidrl.envs.serial import SerialEnv
from lucidrl.envs.specs import Categorical, OneHot
from lucidrl.envs.transforms import ActionMask, CatTensors, Compose, StepCounter, TransformedEnv
from lucidrl.errors import ConfigError, EnvironmentFailure
from tests.unit.envs.transforms.toys import Weather


@pytest.fixture(params=[True, False], ids=["one-hot", "index"])
def one_hot(request):
    return request.param


def choices(actions, one_hot):
    return actions.argmax(-1) if one_hot else actions


@pytest.mark.parametrize("batch_size", [(), (3,), (2, 2)])
def test_random_actions_follow_the_mask(one_hot, batch_size):
    env = TransformedEnv(Weather(batch_size, one_hot=one_hot), ActionMask())
    env.set_seed(3)
    steps = env.rollout(100, break_when_any_done=False)
    chosen = choices(steps["action"], one_hot)
    assert steps["action_mask"].gather(-1, chosen.unsqueeze(-1)).all()
    assert set(chosen.flatten().tolist()) == {0, 1, 2}


def test_the_spec_accepts_the_choices_of_the_current_mask(one_hot):
    env = TransformedEnv(Weather(one_hot=one_hot), Compose(ActionMask(), StepCounter()))
    assert isinstance(env.action_spec, OneHot if one_hot else Categorical)
    env.set_seed(0)
    root = env.reset()
    for _ in range(20):
        accepted = []
        for choice in range(3):
            action = torch.tensor(choice)
            accepted.append(env.action_spec.is_in(torch.nn.functional.one_hot(action, 3) if one_hot else action))
        assert accepted == root["action_mask"].tolist()
        assert env.action_spec.is_in(env.action_spec.rand())
        root = env.step_and_maybe_reset(env.rand_action(root))[1]


def test_all_choices_that_are_left_are_drawn_equally_often():
    class Fixed(Weather):
        def _drawn(self):
            return super()._drawn() | {"action_mask": np.tile([True, False, True], (1000, 1))}

    env = TransformedEnv(Fixed((1000,)), ActionMask())
    env.set_seed(0)
    counts = env.rand_action(env.reset())["action"].sum(0).tolist()
    assert counts[1] == 0
    assert 400 < counts[0] < 600


def test_a_masked_action_is_refused_and_the_mask_shown(one_hot):
    env = TransformedEnv(Weather((2,), one_hot=one_hot), ActionMask())
    env.set_seed(0)
    root = env.rand_action(env.reset())
    forbidden = (~root["action_mask"]).int().argmax(-1)
    assert not root["action_mask"].gather(-1, forbidden.unsqueeze(-1)).all()
    root["action"] = torch.nn.functional.one_hot(forbidden, 3) if one_hot else forbidden
    with pytest.raises(EnvironmentFailure, match=r"'action' .* is masked by 'action_mask' \[\["):
        env.step(root)


def test_a_mask_without_a_choice_raises():
    class Stuck(Weather):
        def _drawn(self):
            return super()._drawn() | {"action_mask": np.zeros(3, bool)}

    env = TransformedEnv(Stuck(), ActionMask())
    env.reset()
    with pytest.raises(EnvironmentFailure, match="allows no action"):
        env.rand_action()


def test_a_batch_is_masked_from_outside():
    env = TransformedEnv(SerialEnv(3, Weather), ActionMask())
    steps = env.rollout(50, break_when_any_done=False)
    assert steps["action_mask"].gather(-1, steps["action"].argmax(-1, keepdim=True)).all()
    with pytest.raises(ConfigError, match="put ActionMask around the batch"):
        SerialEnv(2, lambda: TransformedEnv(Weather(), ActionMask()))


@pytest.mark.parametrize(
    ("transform", "complaint"),
    [
        (lambda: ActionMask(mask_key="legal"), "reads 'legal', but the env has 'observation'"),
        (lambda: ActionMask(action_key="move"), "needs a discrete spec for 'move'"),
        (lambda: ActionMask(mask_key="wide"), r"'wide' has shape \[2\], but the action spec OneHot.* needs \[3\]"),
        (lambda: Compose(CatTensors(["action_mask"]), ActionMask()), "reads 'action_mask'"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(transform, complaint):
    with pytest.raises(ConfigError, match=complaint):
        TransformedEnv(Weather(), transform())
