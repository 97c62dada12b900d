"""What may act in an env, and what is kept of what it puts out."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from lucidrl.envs.policies import as_policy
from lucidrl.errors import ConfigError, DataError
from tests.unit.envs.toys import Walk


class Right(nn.Module):
    """Always goes right."""

    def forward(self, observation):
        action = torch.zeros(observation.shape, dtype=torch.int64)
        action[..., 1] = 1
        return action


class RightWithValue(Right):
    def forward(self, observation):
        return {"action": super().forward(observation), "value": observation.sum(-1, keepdim=True)}


def right_on_tensordict(tensordict):
    return tensordict.set("action", Right()(tensordict["observation"]))


def right_alone(tensordict):
    return Right()(tensordict["observation"])


POLICIES = [
    Right(),
    RightWithValue(),
    TensorDictModule(Right(), in_keys=["observation"], out_keys=["action"]),
    right_on_tensordict,
    right_alone,
]


@pytest.mark.parametrize("batch_size", [(), (3,)])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_kind_of_policy_walks_to_the_right(policy, batch_size):
    env = Walk(batch_size)
    env.set_seed(0)
    rollout = env.rollout(30, policy)
    assert (rollout["action"] == torch.tensor([0, 1])).all()
    assert (rollout["next", "observation"][..., 0] > rollout["observation"][..., 0]).all()
    assert rollout["next", "terminated"].any()


def test_further_outputs_of_a_policy_are_kept():
    rollout = Walk((2,)).rollout(5, RightWithValue())
    torch.testing.assert_close(rollout["value"], torch.ones(2, rollout.shape[1], 1))


def test_a_tensordict_module_keeps_its_out_keys_only():
    class Hidden(nn.Module):
        def forward(self, observation):
            return Right()(observation), observation * 2

    policy = TensorDictModule(Hidden(), in_keys=["observation"], out_keys=["action", "hidden"])
    assert "hidden" in Walk().rollout(2, policy)
    policy.select_out_keys("action")
    assert "hidden" not in Walk().rollout(2, policy)


def test_a_policy_on_several_observations_gets_them_by_name():
    class Both(nn.Module):
        def forward(self, second, first):
            return second - first

    observation = {"first": torch.tensor(1.0), "second": torch.tensor(3.0), "third": torch.tensor(0.0)}
    env = Walk()
    env.observation_spec = env.observation_spec.__class__(dict.fromkeys(observation, env.reward_spec))
    assert as_policy(Both(), env)(observation) == {"action": torch.tensor(2.0)}
    with pytest.raises(ConfigError, match=r"Linear.forward\(input\) do not name observations of the env \(first, "):
        as_policy(nn.Linear(1, 1), env)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (lambda tensordict: TensorDict({"act": torch.zeros(2)}), "returned act, but no 'action'; write"),
        (lambda tensordict: None, "returned a NoneType, but no 'action'"),
        (TensorDictModule(Right(), in_keys=["observation"], out_keys=["move"]), "returned move, but no 'action'"),
        ("right", "policy is 'right'; give a TensorDict module"),
    ],
)
def test_a_policy_without_an_action_is_refused(policy, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Walk().rollout(2, policy)


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (torch.zeros(3, dtype=torch.int64), r"'action' of shape \[3\]; expected \[2\]"),
        (torch.tensor([1, 1]), r"'action' is \[1, 1\], which is not in OneHot"),
        (torch.tensor([0.5, 1.5]), r"'action' is \[0.5, 1.5\], which is not in OneHot"),
    ],
)
def test_an_action_that_the_env_does_not_take_is_refused(action, sentence):
    with pytest.raises(DataError, match=sentence):
        Walk().rollout(2, lambda tensordict: action)


def test_outputs_must_have_the_batch_size_of_the_env():
    def policy(tensordict):
        return {"action": Right()(tensordict["observation"]), "value": torch.zeros(7)}

    with pytest.raises(DataError, match=r"'value' of shape \[7\]; it must begin with \[3\]"):
        Walk((3,)).rollout(2, policy)


def test_nothing_of_a_rollout_needs_gradients():
    class Learning(Right):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, observation):
            return {"action": super().forward(observation), "value": observation * self.scale}

    assert not Walk().rollout(2, Learning())["value"].requires_grad
