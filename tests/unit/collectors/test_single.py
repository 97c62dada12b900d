"""Collector in this process."""

import copy
import logging

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from lucidrl.collectors import local
from lucidrl.collectors.single import Collector, ExplorationType
from lucidrl.collectors.trajectories import MASK, POLICY_VERSION, TRAJECTORY_IDS
from lucidrl.errors import ConfigError, DataError
from tests.unit.envs.toys import START, Countdown, Walk


class Chance(nn.Module):
    """Goes left or right with equal chances, drawn from torch's generator."""

    def forward(self, observation):
        right = (torch.rand(observation.shape[:-1]) < 0.5).long()
        return torch.stack([1 - right, right], dim=-1)


class Versioned(nn.Module):
    """Returns its weight beside the action."""

    def __init__(self, weight=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, observation):
        action = torch.zeros_like(observation, dtype=torch.int64)
        action[..., 0] = 1
        return {"action": action, "weight": self.weight.expand(observation.shape[:-1])}


@pytest.mark.parametrize("batch_size", [(), (4,)])
def test_batches_are_those_of_a_bare_loop(batch_size):
    """The same env, stepped by hand with the actions of the batches, returns the same."""
    collector = Collector(Walk(batch_size), Chance(), frames_per_batch=20, total_frames=60, seed=3)
    batches = torch.cat(list(collector), dim=-1)
    env = Walk(batch_size)
    env.set_seed(3)
    root = env.reset()
    for time in range(batches.shape[-1]):
        frame = batches[..., time]
        assert torch.equal(root["observation"], frame["observation"])
        stepped, root = env.step_and_maybe_reset(root.set("action", frame["action"]))
        for key in ("observation", "reward", "done", "terminated", "truncated"):
            assert torch.equal(stepped["next", key], frame["next", key])


def test_two_collectors_with_one_seed_are_bit_exact():
    def collected(seed):
        return list(Collector(Walk((2,)), Chance(), frames_per_batch=10, total_frames=40, seed=seed))

    first, second, other = collected(1), collected(1), collected(2)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert not all((a == b).all() for a, b in zip(first, other, strict=True))


def test_set_seed_seeds_the_first_batch_and_all_later_ones():
    collector = Collector(Walk(), Chance(), frames_per_batch=10)
    following = collector.set_seed(7)
    assert following == 8
    first = collector.rollout()
    collector.rollout()
    collector.set_seed(7)
    again = collector.rollout()
    assert torch.equal(first["observation"], again["observation"])
    assert (again[TRAJECTORY_IDS] > first[TRAJECTORY_IDS].max()).all()


def test_batches_share_no_memory():
    collector = Collector(Walk((2,)), Chance(), frames_per_batch=10, seed=0)
    first = collector.rollout()
    kept = first.clone()
    collector.rollout()
    assert (first == kept).all()
    pointers = [leaf.untyped_storage().data_ptr() for leaf in first.values(include_nested=True, leaves_only=True)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize(("total", "lengths"), [(30, [10, 10, 10]), (25, [10, 10, 5]), (4, [4]), (10, [10])], ids=str)
def test_the_last_batch_ends_at_total_frames(total, lengths):
    collector = Collector(Walk(), frames_per_batch=10, total_frames=total)
    assert [batch.numel() for batch in collector] == lengths
    assert collector.next() is None


def test_rounded_frame_numbers_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        collector = Collector(Walk((4,)), frames_per_batch=10, total_frames=20)
    assert (
        "frames_per_batch=10 is not a multiple of the 4 envs, which step together; rounding it up to 12" in caplog.text
    )
    assert next(iter(collector)).shape == (4, 3)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Collector(Walk((4,)), frames_per_batch=8, total_frames=18)
    assert "total_frames=18 is not a multiple of the 4 envs, which step together; rounding it up to 20" in caplog.text


def test_both_rounded_frame_numbers_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        collector = Collector(Walk((4,)), frames_per_batch=10, total_frames=18)
    assert "rounding it up to 12" in caplog.text
    assert "rounding it up to 20" in caplog.text
    assert sum(batch.numel() for batch in collector) == 20


def test_a_rollout_has_num_frames():
    whole = Collector(Walk((2,)), Chance(), frames_per_batch=60, seed=0).rollout()
    collector = Collector(Walk((2,)), Chance(), frames_per_batch=10, seed=0)
    parts = torch.cat([collector.rollout(number) for number in (10, 44, 6)], dim=1)
    assert (parts == whole).all()
    for number in (0, -3):
        with pytest.raises(ConfigError, match=f"num_frames={number} is less than 1; set it to at least 1"):
            collector.rollout(number)


def test_new_episodes_begin_after_a_rollout_that_fails():
    """The frames up to there are lost, so later frames belong to new trajectories."""

    class Moody(nn.Module):
        num_calls = 0

        def forward(self, left):
            self.num_calls += 1
            if self.num_calls == 5:
                raise ValueError("not now")
            return torch.ones(1, dtype=torch.int64)

    collector = Collector(Countdown(), Moody(), frames_per_batch=3)
    first = collector.rollout()
    with pytest.raises(ValueError, match="not now"):
        collector.rollout()
    second = collector.rollout()
    assert second["left"][0] == START
    assert second[TRAJECTORY_IDS].min() > first[TRAJECTORY_IDS].max()


def test_a_policy_may_keep_its_inputs():
    kept = []

    def keeping(tensordict):
        kept.append(tensordict["observation"])
        return torch.tensor([0, 1])

    batch = Collector(Walk(), keeping, frames_per_batch=20).rollout()
    assert torch.equal(torch.stack(kept), batch["observation"])


def test_a_batch_has_only_the_outputs_of_its_steps():
    outputs = iter([{"value": torch.tensor(1)}] * 2 + [{}] * 3 + [{"value": torch.tensor(0.5)}] * 2)

    def policy(tensordict):
        return {"action": torch.tensor([0, 1]), **next(outputs)}

    collector = Collector(Walk(), policy, frames_per_batch=3)
    assert collector.rollout()["value"].tolist() == [1, 1, 0]
    assert "value" not in collector.rollout(2)
    assert collector.rollout(2)["value"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        ([{"value": 1.0}], "the policy returned 'value' as a float; every output must be a tensor"),
        ([{"action": [0, 1]}], "the policy returned 'action' as a list; every output must be a tensor"),
        (
            [{"value": torch.tensor(1)}, {"value": torch.tensor(0.5)}],
            r"the policy returned 'value' as torch\.float32, but as torch\.int64 in an earlier step; keep one dtype",
        ),
    ],
)
def test_outputs_that_cannot_be_kept_are_refused(outputs, sentence):
    steps = iter(outputs)
    collector = Collector(Walk(), lambda td: {"action": torch.tensor([0, 1]), **next(steps)}, frames_per_batch=5)
    with pytest.raises(DataError, match=sentence):
        collector.rollout()


def test_trajectories_continue_across_batches_and_get_new_numbers_at_their_ends():
    collector = Collector(Countdown((3,)), frames_per_batch=12, total_frames=120, seed=0)
    batch = torch.cat(list(collector), dim=-1)
    ids, done = batch[TRAJECTORY_IDS], batch["next", "done"].squeeze(-1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    assert torch.equal(batch["left"][:, 1:, 0][done[:, :-1]].unique(), torch.tensor([START]))
    assert len(ids.unique()) == 3 + int(done[:, :-1].sum())


def test_initial_frames_are_random_in_whole_batches():
    collector = Collector(Walk(), Versioned(), frames_per_batch=10, init_random_frames=15, total_frames=40, seed=0)
    is_left = [(batch["action"][:, 0] == 1).all().item() for batch in collector]
    assert is_left == [False, False, True, True]


def test_long_trajectories_are_truncated_and_marked():
    collector = Collector(Countdown(), frames_per_batch=30, max_frames_per_traj=4, seed=0)
    batch = collector.rollout()
    assert batch["next", "truncated"].squeeze(-1)[3::4].all()
    assert torch.equal(batch["next", "done"], batch["next", "truncated"] | batch["next", "terminated"])
    assert (batch["left"][4::4, 0] == START).all()


def test_split_trajectories_are_padded_rows_with_a_mask():
    collector = Collector(Countdown((2,)), frames_per_batch=60, split_trajs=True, seed=0)
    split = collector.next()
    assert split[MASK].sum() == 60
    assert (split["left"][:, 0] == START).all()
    assert not split["left"][~split[MASK]].any()


def test_every_batch_can_begin_with_a_reset():
    collector = Collector(Countdown(), frames_per_batch=3, total_frames=9, reset_at_each_iter=True, seed=0)
    batches = list(collector)
    assert [batch["left"][0].item() for batch in batches] == [START] * 3
    assert [batch[TRAJECTORY_IDS].unique().tolist() for batch in batches] == [[0], [1], [2]]


def test_postproc_replay_buffer_and_hook_get_each_batch():
    class Buffer(list):
        def extend(self, data):
            self.append(data)

    hooked, buffer = [], Buffer()
    collector = Collector(
        Walk(),
        frames_per_batch=5,
        total_frames=10,
        postproc=lambda batch: batch.set("scaled", batch["next", "reward"] * 2),
        replay_buffer=buffer,
        post_collect_hook=hooked.append,
    )
    batches = list(collector)
    assert len(batches) == len(buffer) == len(hooked) == 2
    assert all(given is batch for given, batch in zip(buffer, batches, strict=True))
    assert torch.equal(batches[0]["scaled"], batches[0]["next", "reward"] * 2)


def test_the_exploration_type_decides_how_a_probabilistic_policy_acts():
    from tensordict.nn import ProbabilisticTensorDictModule, TensorDictSequential

    class Favour(nn.Module):
        def forward(self, observation):
            return torch.tensor([0.4, 0.6]).expand(observation.shape)

    policy = TensorDictSequential(
        TensorDictModule(Favour(), in_keys=["observation"], out_keys=["probs"]),
        ProbabilisticTensorDictModule(
            in_keys=["probs"], out_keys=["action"], distribution_class=torch.distributions.OneHotCategorical
        ),
    )

    def share_of_right(exploration_type):
        collector = Collector(Walk(), policy, frames_per_batch=50, exploration_type=exploration_type, seed=0)
        return collector.rollout()["action"][:, 1].float().mean().item()

    assert share_of_right(ExplorationType.MODE) == 1.0
    assert 0.3 < share_of_right(ExplorationType.RANDOM) < 0.9


def test_weights_in_use_are_stamped_on_the_frames():
    policy = Versioned()
    collector = Collector(Walk((2,)), policy, frames_per_batch=4)
    versions, weights = [], []
    for version in range(3):
        batch = collector.rollout()
        versions.append(batch[POLICY_VERSION].unique().item())
        weights.append(batch["weight"].unique().item())
        collector.update_policy_weights_({"weight": torch.tensor(float(version + 1))})
    assert versions == weights == [0, 1, 2]
    collector.update_policy_weights_(Versioned(9.0), version=40)
    batch = collector.rollout()
    assert (batch[POLICY_VERSION] == 40).all()
    assert (batch["weight"] == 9).all()


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({}, "the weights lack weight of the policy; pass the policy's whole state dict"),
        ({"weight": torch.zeros(()), "bias": torch.zeros(1)}, "the policy has no weights bias; pass only"),
        ({"weight": torch.zeros(2)}, r"the weight weight has shape \[2\], but the policy needs \[\]"),
        ({"weight": 7.0}, r"entries that are not tensors \(weight\); pass tensors only"),
        (3, "weights cannot be taken from a int"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(weights, sentence):
    collector = Collector(Walk(), Versioned(5.0), frames_per_batch=4)
    with pytest.raises(ConfigError, match=sentence):
        collector.update_policy_weights_(weights)
    batch = collector.rollout()
    assert (batch["weight"] == 5).all()
    assert (batch[POLICY_VERSION] == 0).all()


def test_batches_are_on_the_storing_device():
    for arguments in ({"storing_device": "meta"}, {"device": "meta"}):
        assert Collector(Walk(), frames_per_batch=4, **arguments).rollout().device.type == "meta"
    assert Collector(Walk(), frames_per_batch=4, device="meta", storing_device="cpu").rollout().device.type == "cpu"


def test_a_policy_for_another_device_stays_where_it_is():
    policy = Versioned()
    collector = Collector(Walk(), policy, frames_per_batch=4, policy_device="meta")
    assert (policy.weight.device.type, collector.policy.weight.device.type) == ("cpu", "meta")


def test_a_copy_of_the_policy_gets_its_weights_by_an_update(monkeypatch):
    monkeypatch.setattr(local, "on_device", lambda policy, device: copy.deepcopy(policy))  # as for another device
    policy = Versioned()
    collector = Collector(Walk(), policy, frames_per_batch=4)
    policy.load_state_dict({"weight": torch.tensor(3.0)})
    assert (collector.rollout()["weight"] == 0).all()
    collector.update_policy_weights_()
    assert (collector.rollout()["weight"] == 3).all()


def test_only_the_out_keys_of_a_policy_are_kept():
    class Talkative(TensorDictModuleBase):
        in_keys = ("observation",)
        out_keys = ("action", ("deep", "product"))

        def forward(self, tensordict):
            tensordict["sum"] = tensordict["observation"].sum()
            tensordict["deep", "product"] = tensordict["observation"].prod()
            return tensordict.set("action", torch.tensor([0, 1]))

    batch = Collector(Walk(), Talkative(), frames_per_batch=4).rollout()
    assert "sum" not in batch
    assert torch.equal(batch["deep", "product"], batch["observation"].prod(-1))


def test_an_observation_is_unchanged_by_the_policy():
    def policy(tensordict):
        tensordict["seen"] = tensordict["observation"].clone()
        tensordict["observation"] = torch.zeros(2)
        return tensordict.set("action", torch.tensor([0, 1]))

    batch = Collector(Walk(), policy, frames_per_batch=4).rollout()
    assert torch.equal(batch["observation"], batch["seen"])


def test_a_state_begins_new_episodes():
    collector = Collector(Countdown(), frames_per_batch=3)
    before = collector.rollout()
    collector.load_state_dict(collector.state_dict())
    after = collector.rollout()
    assert after["left"][0] == START
    assert after[TRAJECTORY_IDS].min() > before[TRAJECTORY_IDS].max()


def test_a_collector_continues_to_count_from_its_state():
    collector = Collector(Walk(), frames_per_batch=10, total_frames=40, seed=0)
    for _ in range(3):
        last = collector.next()
    resumed = Collector(Walk(), frames_per_batch=10, total_frames=40, seed=0)
    resumed.load_state_dict(collector.state_dict())
    rest = list(resumed)
    assert [batch.numel() for batch in rest] == [10]
    assert rest[0][TRAJECTORY_IDS].min() > last[TRAJECTORY_IDS].max()


def test_map_fn_calls_a_method():
    collector = Collector(Walk(), frames_per_batch=10)
    assert collector.map_fn("set_seed", [(3,)]) == [4]
    with pytest.raises(ConfigError, match=r"list_of_args has 2 tuples for 1 worker"):
        collector.map_fn("set_seed", [(3,), (4,)])
    with pytest.raises(ConfigError, match="Collector has no method 'fly'; pass"):
        collector.map_fn("fly", [()])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"frames_per_batch": 0}, "frames_per_batch=0 is less than 1; set it to at least 1"),
        ({"frames_per_batch": 10, "total_frames": 0}, "total_frames=0 collects nothing"),
        ({"frames_per_batch": 10, "max_frames_per_traj": -2}, "-2"),
        (
            {"frames_per_batch": 10, "device": "cuda:77"},
            "device cuda:77 cannot be used; choose a device",
        ),
        ({"frames_per_batch": 10, "policy_device": "gpu"}, "device gpu cannot be used; choose"),
    ],
)
def test_invalid_numbers_are_refused(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Collector(Walk(), **arguments)


def test_a_factory_that_returns_nothing_is_refused():
    with pytest.raises(ConfigError, match="None"):
        Collector(lambda: None, frames_per_batch=10)


def test_a_policy_without_the_action_key_is_refused():
    collector = Collector(Walk(), lambda tensordict: tensordict, frames_per_batch=10)
    with pytest.raises(ConfigError, match="but no 'action'"):
        collector.rollout()


def test_a_collector_that_was_shut_down_says_so():
    with Collector(Walk(), frames_per_batch=10) as collector:
        collector.rollout()
    collector.shutdown()
    assert collector.env.is_closed
    with pytest.raises(ConfigError, match="the collector was shut down"):
        collector.rollout()
