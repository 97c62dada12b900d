"""Trajectory numbers, and batches split by trajectory."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from lucidrl.collectors.trajectories import MASK, TRAJECTORY_IDS, TrajectoryNumbers, split_trajectories


def counted_by_hand(done, current, following):
    """Frame by frame: an env that is done takes the next number."""
    ids = np.zeros(done.shape, np.int64)
    for time in range(done.shape[1]):
        for env in range(done.shape[0]):
            ids[env, time] = current[env]
            if done[env, time]:
                current[env] = following
                following += 1
    return ids, following


@given(st.integers(1, 4), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_numbers_equal_counting_frame_by_frame_across_batches(num_envs, lengths, random):
    numbers = TrajectoryNumbers((num_envs,))
    current, following = list(range(num_envs)), num_envs
    for length in lengths:
        done = np.array([[random.random() < 0.3 for _ in range(length)] for _ in range(num_envs)])
        expected, following = counted_by_hand(done, current, following)
        assert numbers.of(done).tolist() == expected.tolist()


def test_workers_with_a_stride_never_share_a_number():
    done = np.array([False, True, True, False])
    of_workers = [TrajectoryNumbers((), first, stride=2).of(done).tolist() for first in range(2)]
    assert of_workers == [[0, 0, 2, 4], [1, 1, 3, 5]]


def test_new_episodes_get_new_numbers():
    numbers = TrajectoryNumbers((2,))
    done = np.zeros((2, 3), bool)
    first = numbers.of(done)
    assert torch.equal(numbers.of(done), first)
    numbers.reset()
    assert numbers.of(done)[:, 0].tolist() == [2, 3]


def test_split_rows_have_each_trajectory_in_order_and_zeros_after_it():
    ids = torch.tensor([[0, 0, 2, 2, 2], [1, 3, 3, 4, 4]])
    frames = torch.arange(1, 11).view(2, 5, 1)
    batch = TensorDict({"frame": frames, TRAJECTORY_IDS: ids, "next": {"frame": frames + 100}}, [2, 5])
    split = split_trajectories(batch)
    assert split["frame"].squeeze(-1).tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0], [7, 8, 0], [9, 10, 0]]
    assert split[MASK].sum(dim=1).tolist() == [2, 3, 1, 2, 2]
    assert torch.equal(split["next", "frame"][split[MASK]], split["frame"][split[MASK]] + 100)


def test_split_keeps_every_frame_of_a_single_env():
    batch = TensorDict({"frame": torch.arange(4), TRAJECTORY_IDS: torch.tensor([7, 7, 8, 8])}, [4])
    split = split_trajectories(batch)
    assert split["frame"].tolist() == [[0, 1], [2, 3]]
    assert split[TRAJECTORY_IDS].tolist() == [[7, 7], [8, 8]]
