"""AsyncBatchedCollector: envs step independently, and one policy acts for those that are ready."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn

from lucidrl.collectors.async_batched import AsyncBatchedCollector
from lucidrl.collectors.policy_server import PolicyServer
from lucidrl.collectors.single import ExplorationType
from lucidrl.collectors.trajectories import MASK, POLICY_VERSION, TRAJECTORY_IDS
from lucidrl.envs.creator import EnvCreator
from lucidrl.errors import ConfigError, DataError, EnvironmentFailure
from tests.unit.collectors.toys import Chance, SlowWalk, Versioned, always_right, without_action
from tests.unit.envs.faulty import one_faulty
from tests.unit.envs.toys import START, Countdown, Walk

NUM_ENVS = 3


class Recording(nn.Module):
    """Goes right, and records the number of envs of each call."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, observation):
        self.sizes.append(len(observation))
        return torch.tensor([0, 1]).expand(len(observation), 2)


def frames_of_all(collector):
    """Batches until every env has a frame."""
    batches = []
    for _ in range(500):
        batches.append(collector.next())
        if len(torch.cat(batches)["env_index"].unique()) == NUM_ENVS:
            return torch.cat(batches)
    raise AssertionError("some env never gave a frame")


def of_env(frames, index):
    return frames[frames["env_index"] == index]


def test_frames_of_one_env_are_those_of_a_bare_loop_in_order():
    """The same env, stepped by hand with the actions of the batches, returns the same."""
    with AsyncBatchedCollector([Walk] * NUM_ENVS, Chance(), frames_per_batch=50, total_frames=300, seed=3) as collector:
        batches = list(collector)
    assert [batch.shape for batch in batches] == [(50,)] * 6
    frames = torch.cat(batches)
    for index in range(NUM_ENVS):
        env = Walk()
        env.set_seed(3 + index)
        root = env.reset()
        for frame in of_env(frames, index):
            assert torch.equal(root["observation"], frame["observation"])
            assert not frame["done"].any()
            stepped, root = env.step_and_maybe_reset(root.set("action", frame["action"]))
            for key in ("observation", "reward", "done", "terminated", "truncated"):
                assert torch.equal(stepped["next", key], frame["next", key])


def test_numbers_of_trajectories_are_unique_and_grow():
    with AsyncBatchedCollector([Walk] * NUM_ENVS, Chance(), frames_per_batch=200, seed=0) as collector:
        frames = torch.cat([collector.next(), collector.next()])
    seen = set()
    for index in range(NUM_ENVS):
        ids, done = of_env(frames, index)[TRAJECTORY_IDS], of_env(frames, index)["next", "done"].squeeze(-1)
        assert torch.equal(ids[1:] > ids[:-1], done[:-1])
        assert not seen & set(ids.tolist())
        seen |= set(ids.tolist())


def test_the_last_batch_is_shorter():
    with AsyncBatchedCollector([Walk] * NUM_ENVS, frames_per_batch=20, total_frames=50) as collector:
        assert [batch.numel() for batch in collector] == [20, 20, 10]
        assert collector.next() is None


def test_an_env_that_hangs_delays_only_itself():
    with AsyncBatchedCollector(one_faulty(2, 1, "hang"), frames_per_batch=100) as collector:
        batch = collector.next()
    assert len(of_env(batch, 0)) >= 98
    assert len(of_env(batch, 1)) <= 2


def test_the_policy_acts_for_all_ready_envs_at_once():
    policy = Recording()
    with AsyncBatchedCollector([Walk] * NUM_ENVS, policy, frames_per_batch=300) as collector:
        collector.next()
        collector.next()
    assert policy.sizes[0] == NUM_ENVS
    assert set(policy.sizes) <= {1, 2, 3}
    assert sum(policy.sizes) == 600 + NUM_ENVS  # the envs go on while the consumer works


def test_whole_trajectories_are_yielded_as_they_finish():
    with AsyncBatchedCollector(
        [Walk] * NUM_ENVS, Chance(), frames_per_batch=10, total_frames=200, yield_completed_trajectories=True, seed=1
    ) as collector:
        trajectories = list(collector)
    assert sum(len(t) for t in trajectories) >= 200 > sum(len(t) for t in trajectories[:-1])
    for trajectory in trajectories:
        assert trajectory["next", "done"].squeeze(-1).tolist() == [False] * (len(trajectory) - 1) + [True]
        assert trajectory[TRAJECTORY_IDS].unique().numel() == 1
        assert trajectory["env_index"].unique().numel() == 1
        assert torch.equal(trajectory["observation"][1:], trajectory["next", "observation"][:-1])
    assert len({int(t[TRAJECTORY_IDS][0]) for t in trajectories}) == len(trajectories)


@pytest.mark.parametrize(
    "policy",
    [Chance(), TensorDictModule(Chance(), in_keys=["observation"], out_keys=["action"]), always_right, None],
    ids=["module", "tensordict module", "callable", "random"],
)
def test_every_kind_of_policy_works(policy):
    with AsyncBatchedCollector([Walk] * NUM_ENVS, policy, frames_per_batch=60, seed=0) as collector:
        actions = collector.next()["action"]
    assert (actions.sum(-1) == 1).all()
    assert len(actions.unique(dim=0)) == (1 if policy is always_right else 2)


def test_every_frame_has_its_policy_version():
    policy = Versioned(size=3)
    with AsyncBatchedCollector([Walk] * NUM_ENVS, policy, frames_per_batch=20) as collector:
        for version in range(1, 6):
            batch = collector.next()
            assert torch.equal(batch["smallest"], batch[POLICY_VERSION].float())
            # Every env may have been in the middle of one step.
            assert (batch[POLICY_VERSION] == version - 1).sum() >= 20 - NUM_ENVS
            collector.update_policy_weights_(Versioned(version, size=3).state_dict())
        with pytest.raises(ConfigError, match="weight has shape"):
            collector.update_policy_weights_({"weight": torch.zeros(4)})


def test_batches_share_no_memory():
    with AsyncBatchedCollector([Walk] * NUM_ENVS, frames_per_batch=20) as collector:
        first = collector.next()
        kept = first.clone()
        collector.next()
    assert (first == kept).all()


def test_set_seed_begins_new_episodes_and_seeds_every_env():
    with AsyncBatchedCollector([Walk] * NUM_ENVS, always_right, frames_per_batch=60) as collector:
        assert collector.set_seed(7) == 7 + NUM_ENVS
        first = frames_of_all(collector)
        collector.set_seed(7)
        again = frames_of_all(collector)
    assert again[TRAJECTORY_IDS].min() > first[TRAJECTORY_IDS].max()
    for index in range(NUM_ENVS):
        one, two = of_env(first, index)["observation"], of_env(again, index)["observation"]
        length = min(len(one), len(two))
        assert torch.equal(one[:length], two[:length])


def test_the_first_actions_are_random_with_init_random_frames():
    with AsyncBatchedCollector(
        [Walk] * NUM_ENVS, always_right, frames_per_batch=30, init_random_frames=60
    ) as collector:
        frames = torch.cat([collector.next() for _ in range(5)])
    # Those that an env was slow to take come later than others that were decided on after them.
    assert 0 < (frames["action"][:, 0] == 1).sum() < 60


def test_trajectories_are_truncated_split_and_reset():
    with AsyncBatchedCollector(
        [Countdown] * 2, frames_per_batch=24, max_frames_per_traj=4, split_trajs=True, reset_at_each_iter=True
    ) as collector:
        for _ in range(2):
            batch = collector.next()
            assert batch.shape[1] == 4
            assert batch[MASK].sum() == 24
            assert (batch["left"][:, 0] == START).all()
            whole = batch[batch[MASK].all(-1)]
            assert len(whole) > 0
            assert whole["next", "truncated"].squeeze(-1).tolist() == [[False, False, False, True]] * len(whole)


def test_hook_postproc_and_buffer_see_every_batch():
    seen, kept = [], []

    class Buffer:
        extend = kept.append

    with AsyncBatchedCollector(
        [Walk] * 2,
        frames_per_batch=10,
        total_frames=20,
        postproc=lambda batch: batch.set("mark", torch.ones(batch.shape)),
        replay_buffer=Buffer(),
        post_collect_hook=lambda batch: seen.append("mark" in batch),
    ) as collector:
        batches = list(collector)
    assert kept == batches
    assert seen == [False, False]


def test_a_collector_resumes_from_a_state():
    with AsyncBatchedCollector([Walk] * 2, Versioned(size=3), frames_per_batch=10, total_frames=50) as collector:
        collector.update_policy_weights_()
        before = torch.cat([collector.next(), collector.next()])
        state = collector.map_fn("state_dict", [()])[0]
    with AsyncBatchedCollector([Walk] * 2, Versioned(size=3), frames_per_batch=10, total_frames=50) as collector:
        collector.load_state_dict(state)
        after = torch.cat(list(collector))
    assert len(after) == 30
    assert (after[POLICY_VERSION] == 1).all()
    assert after[TRAJECTORY_IDS].min() > before[TRAJECTORY_IDS].max()


def test_a_state_beyond_the_random_frames_has_none_of_them():
    with AsyncBatchedCollector([Walk] * 2, always_right, frames_per_batch=30, init_random_frames=60) as collector:
        collector.load_state_dict({"num_frames": 60, "policy_version": 0, "num_trajectories": 5})
        assert (collector.next()["action"][:, 1] == 1).all()


def test_after_a_reset_no_trajectory_is_one_that_was_done_before():
    def slowly(tensordict):
        time.sleep(0.01)  # other envs are ready by then, and done in the same step
        return torch.full((len(tensordict), 1), 3)

    with AsyncBatchedCollector(
        [Countdown] * NUM_ENVS, slowly, frames_per_batch=10, yield_completed_trajectories=True
    ) as collector:
        for num_taken in (1, 2, 1):
            for _ in range(num_taken):
                collector.next()
            num_trajectories = collector.state_dict()["num_trajectories"]
            collector.reset()
            assert (collector.next()[TRAJECTORY_IDS] >= num_trajectories).all()


def test_after_a_reset_no_trajectory_is_of_earlier_episodes():
    with AsyncBatchedCollector(
        [Walk] * NUM_ENVS, Chance(), frames_per_batch=10, yield_completed_trajectories=True, seed=1
    ) as collector:
        for _ in range(5):
            before = [collector.next() for _ in range(4)]
            num_trajectories = collector.state_dict()["num_trajectories"]
            collector.reset()
            after = [collector.next() for _ in range(4)]
            assert max(t[TRAJECTORY_IDS].max() for t in before) < num_trajectories
            assert all((t[TRAJECTORY_IDS] == t[TRAJECTORY_IDS][0]).all() for t in after)
            assert min(t[TRAJECTORY_IDS].min() for t in after) >= num_trajectories


def test_the_exploration_type_decides_how_a_probabilistic_policy_acts():
    policy = TensorDictSequential(
        TensorDictModule(lambda o: torch.tensor([0.4, 0.6]).expand(o.shape), ["observation"], ["probs"]),
        ProbabilisticTensorDictModule(["probs"], ["action"], distribution_class=torch.distributions.OneHotCategorical),
    )
    with AsyncBatchedCollector(
        [Walk] * 2, policy, frames_per_batch=50, exploration_type=ExplorationType.MODE
    ) as collector:
        assert (collector.next()["action"][:, 1] == 1).all()


def test_finished_envs_are_returned_in_ascending_order():
    server = PolicyServer([EnvCreator(Walk)] * 4, step_timeout_s=20, start_timeout_s=300)
    try:
        server.begin(None, version=0)
        arrived = []
        while len(arrived) < 4:
            arrived += server.wait().tolist()
        server.step(np.array([3, 0, 2]), None, version=0)
        time.sleep(0.5)  # until all are done
        assert server.wait().tolist() == [0, 2, 3]
    finally:
        server.close()


def test_a_policy_that_raised_once_is_called_again():
    class Moody(nn.Module):
        num_calls = 0

        def forward(self, observation):
            self.num_calls += 1
            if self.num_calls == 5:
                raise ValueError("not now")
            return torch.tensor([0, 1]).expand(len(observation), 2)

    with AsyncBatchedCollector([Walk] * NUM_ENVS, Moody(), frames_per_batch=20) as collector:
        with pytest.raises(ValueError, match="not now"):
            collector.next()
        frames_of_all(collector)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frames_per_batch": 0}, "frames_per_batch=0 is less than 1"),
        ({"create_env_fn": Walk}, "create_env_fn is not a list; pass a list with one factory per env"),
        ({"create_env_fn": [lambda: None]}, "the factory of env 0 returned None"),
        ({"create_env_fn": [partial(Walk, (2,))]}, r"the factories make envs of batch size \[2\]"),
        ({"policy": 3}, "policy is 3; give a TensorDict module"),
    ],
)
def test_bad_input_is_refused_at_once(arguments, message):
    with pytest.raises(ConfigError, match=message):
        AsyncBatchedCollector(**{"create_env_fn": [Walk] * 2, "frames_per_batch": 10, **arguments})


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (without_action, ConfigError, "the policy without_action returned motion, but no 'action'"),
        (lambda td: torch.zeros(2, 5), DataError, r"'action' of shape \[2, 5\], but \[2, 2\] is needed for 2 envs"),
        (lambda td: torch.ones(2, 2), DataError, r"the policy's 'action' is \[1\.0, .*\], which is not in OneHot"),
        (lambda td: torch.full((2, 2), 0.7), DataError, r"'action' is \[0\.6999.*\], which is not in OneHot"),
        (
            lambda td: {"action": [0, 1]},
            DataError,
            "the policy returned 'action' as a list; every output must be a tensor",
        ),
    ],
)
def test_a_policy_that_does_not_fit_the_envs_is_refused(policy, error, message):
    collector = AsyncBatchedCollector([Walk] * 2, policy, frames_per_batch=10)
    with pytest.raises(error, match=message):
        collector.next()


def test_a_policy_that_does_not_fit_the_envs_is_refused_when_it_first_acts():
    both = lambda td: torch.ones(len(td), 2)  # noqa: E731
    collector = AsyncBatchedCollector([Walk] * 2, both, frames_per_batch=10, init_random_frames=10)
    with collector, pytest.raises(DataError, match="which is not in OneHot"):
        list(collector)


def test_a_policy_may_keep_and_change_its_inputs():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = []

        def forward(self, observation):
            self.kept.append(observation)
            action = torch.tensor([0, 1]).expand(len(observation), 2)
            return {"action": action, "seen": observation.clone(), "zeroed": observation.zero_()}

    policy = Keeping()
    with AsyncBatchedCollector([Walk] * NUM_ENVS, policy, frames_per_batch=60, seed=0) as collector:
        batch = collector.next()
    assert torch.equal(batch["observation"], batch["seen"])
    assert all((observation == 0).all() for observation in policy.kept)


def test_an_output_of_another_dtype_is_refused():
    dtypes = iter([torch.int64])

    def policy(tensordict):
        return {"action": always_right(tensordict), "value": torch.ones(len(tensordict), dtype=next(dtypes, None))}

    collector = AsyncBatchedCollector([Walk] * 2, policy, frames_per_batch=30)
    with (
        collector,
        pytest.raises(DataError, match=r"as torch\.float32, but as torch\.int64 in an earlier step"),
    ):
        collector.next()


def test_a_start_that_fails_leaves_no_process():
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError, match="seed=-1 is not between"):  # whose traceback holds the collector
        AsyncBatchedCollector([Walk] * 2, frames_per_batch=10, seed=-1)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_weights_that_another_thread_updates_are_never_torn():
    stop = threading.Event()
    with AsyncBatchedCollector([Walk] * 2, Versioned(), frames_per_batch=20) as collector:

        def publish():
            while not stop.is_set():
                collector.update_policy_weights_(Versioned(collector.policy_version + 1))

        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            frames = torch.cat([collector.next() for _ in range(50)])
        finally:
            stop.set()
            publisher.join()
    assert torch.equal(frames["smallest"], frames[POLICY_VERSION].float())
    assert torch.equal(frames["largest"], frames[POLICY_VERSION].float())


def test_a_seed_from_another_thread_takes_effect_between_two_batches():
    with AsyncBatchedCollector([SlowWalk] * 2, frames_per_batch=100, step_timeout_s=5) as collector:
        seeding = threading.Timer(0.03, collector.set_seed, (7,))
        seeding.start()
        first = collector.next()
        seeding.join()
        second = collector.next()
    assert first[TRAJECTORY_IDS].max() < second[TRAJECTORY_IDS].min()


def test_a_shutdown_from_another_thread_raises():
    collector = AsyncBatchedCollector([lambda: SlowWalk(0.1)] * 2, frames_per_batch=100)
    threading.Timer(0.3, collector.shutdown).start()
    with pytest.raises(EnvironmentFailure, match="the envs were closed during a step"):
        collector.next()


def test_an_env_that_fails_is_named_and_all_processes_end():
    collector = AsyncBatchedCollector(one_faulty(2, 1, "raise"), frames_per_batch=50, total_frames=10**6, seed=20)
    with pytest.raises(EnvironmentFailure, match=r"env 1 \(seed 21, action .*\) failed in its step: ValueError: the"):
        list(collector)  # on a busy machine, env 0 may fill several batches before env 1 steps
    with pytest.raises(EnvironmentFailure, match="the env processes have exited: env 1"):
        collector.next()
    collector.shutdown()


@pytest.mark.parametrize(
    ("number", "what"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "step_timeout_s=0.5")]
)
def test_an_env_process_that_is_killed_or_stopped_is_reported(number, what):
    collector = AsyncBatchedCollector([Walk] * 2, frames_per_batch=50, total_frames=10**6, step_timeout_s=0.5)
    collector.next()
    os.kill(collector._server.env.processes[1].pid, number)
    begun = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=rf"env 1 .*{what}"):
        list(collector)
    assert time.monotonic() - begun < 30


def test_shutdown_twice_is_fine_and_later_calls_say_so():
    collector = AsyncBatchedCollector([Walk] * 2, frames_per_batch=10)
    collector.next()
    begun = time.monotonic()
    collector.shutdown()
    collector.shutdown()
    assert time.monotonic() - begun < 30
    with pytest.raises(ConfigError, match="the collector was shut down; create a new collector"):
        collector.next()
