"""A user's network by import path: shapes, refusals, checkpoints."""

from __future__ import annotations

import pytest
import torch

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.models.control.interfaces import ContinuousActions, DiscreteActions, ObservationSpace
from lucidrl.models.control.policy import ControlPolicy

NETS = """
import torch
from torch import nn

def actor(observation_shape, action_shape, width=8):
    assert isinstance(width, int)
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(observation_shape).numel(), width), nn.BatchNorm1d(width),
                         nn.Linear(width, torch.Size(action_shape).numel()))

def critic(observation_shape, action_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(observation_shape).numel(), 1))

class Flat(nn.Module):
    def __init__(self, observation_shape, action_shape):
        super().__init__()
        self.layer = nn.Linear(observation_shape[0], 1)
    def forward(self, observation):
        assert observation.dim() == 2
        return self.layer(observation).squeeze(-1)

def wrong(observation_shape, action_shape):
    return nn.Linear(observation_shape[0], action_shape[0] + 1)

def integers(observation_shape, action_shape):
    class Counting(nn.Linear):
        def forward(self, x):
            return super().forward(x).long()
    return Counting(observation_shape[0], action_shape[0])

def several(observation_shape, action_shape):
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x
    return Pair(observation_shape[0], action_shape[0])

shared = nn.Linear(3, 1)
def same(observation_shape, action_shape):
    return shared

def no_module(observation_shape, action_shape):
    return lambda x: x

def empty(observation_shape, action_shape):
    return nn.Identity()

def raising(observation_shape, action_shape):
    raise RuntimeError("no luck")
"""


@pytest.fixture(autouse=True)
def own_nets(tmp_path, monkeypatch):
    (tmp_path / "control_test_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)


def make_policy(actor="actor", critic="critic", actions=None, shape=(3,), **kwargs) -> ControlPolicy:
    torch.manual_seed(0)
    return ControlPolicy(
        ObservationSpace(shape),
        actions or DiscreteActions(2),
        ControlPolicyConfig(network=actor and f"control_test_nets:{actor}", network_kwargs=kwargs),
        CriticConfig(network=critic and f"control_test_nets:{critic}"),
    )


@pytest.mark.parametrize(
    ("actions", "shape", "num_latent"),
    [
        (DiscreteActions(4), (3,), ()),
        (ContinuousActions(torch.full((2, 3), -1.0), torch.full((2, 3), 1.0)), (3,), (6,)),
        (DiscreteActions(2), (4, 4, 3), ()),
    ],
    ids=["discrete", "continuous", "images"],
)
def test_a_network_serves_any_leading_dims(actions, shape, num_latent):
    policy = make_policy(actions=actions, shape=shape)
    observations = torch.randint(0, 255, (5, 7, *shape), dtype=torch.uint8)
    acted = policy.network(observations)
    assert acted["latent_action"].shape == (5, 7, *num_latent)
    assert acted["sample_log_prob"].shape == (5, 7)
    assert policy.values(observations).shape == (5, 7)
    assert policy.greedy(observations).shape[:2] == (5, 7)


def test_a_critic_may_return_one_number_per_row_with_or_without_a_dim():
    for critic in ("critic", "Flat"):
        assert make_policy(critic=critic).values(torch.randn(5, 3)).shape == (5,)


def test_arguments_reach_the_function():
    assert make_policy(width=16).network.body.network[1].out_features == 16
    with pytest.raises(ValueError, match="set network=module:function too"):
        ControlPolicyConfig(network_kwargs={"width": 3})


def test_the_test_of_a_network_leaves_its_statistics_and_mode():
    norm = make_policy().network.body.network[2]
    assert norm.training
    assert int(norm.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("actor", "critic", "said"),
    [
        ("wrong", None, r"policy\.network='control_test_nets:wrong' returns outputs of shape \[2, 3\] for 2 "
         r"observations; return a tensor of shape \[2, 2\], a logit or mean per action"),
        ("actor", "actor", r"critic\.network=.* shape \[2, 2\] for 2 observations; return .* \[2, 1\], the value of"),
        ("several", None, "returns outputs of type tuple"),
        ("integers", None, r"returns outputs of torch\.int64; return floating-point"),
        ("same", "same", "returns outputs of shape"),
        ("no_module", None, r"returned a function; return a torch\.nn\.Module"),
        ("empty", None, "without trainable parameters"),
        ("raising", None, r"raised RuntimeError when called with the shapes \(3,\) of an observation and \(2,\) of an "
         "action: no luck"),
        ("absent", None, "module control_test_nets has no function absent"),
    ],
)  # fmt: skip
def test_a_wrong_network_is_one_sentence(actor, critic, said):
    with pytest.raises(ConfigError, match=said) as error:
        make_policy(actor, critic)
    assert "\n" not in str(error.value)


def test_paths_that_cannot_be_imported_are_named():
    for name, said in (("nets.make", "is not of the form module:function"), ("absent_nets:make", "no module absent")):
        with pytest.raises(ConfigError, match=said):
            ControlPolicy(ObservationSpace((3,)), DiscreteActions(2), ControlPolicyConfig(network=name), CriticConfig())


def test_networks_that_share_parameters_are_refused():
    one = ContinuousActions(torch.tensor([-1.0]), torch.tensor([1.0]))
    with pytest.raises(ConfigError, match="share the parameter weight, but each has its own optimizer"):
        make_policy("same", "same", actions=one)


def test_checkpoints_hold_the_network_with_its_buffers(tmp_path):
    policy = make_policy()
    policy.network(torch.randn(9, 3))  # changes the batch statistics
    pending = CheckpointManager(tmp_path / "checkpoints").begin(1)
    policy.begin_save(pending.folder)
    pending.commit(policy.finish_save())
    folder = CheckpointManager(tmp_path / "checkpoints").latest().path
    loaded = make_policy()
    loaded.load(folder)
    for name, tensor in policy.network.state_dict().items():
        assert tensor.equal(loaded.network.state_dict()[name]), name
    with pytest.raises(CheckpointError, match=r"another network: .*use the env, policy\.network"):
        make_policy(actor=None).load(folder)
    with pytest.raises(CheckpointError, match=r"another network: body\.network\.1\.weight should have shape \[4, 3\]"):
        make_policy(width=4).load_weights(folder)
