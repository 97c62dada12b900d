"""Episodes are counted whole, wherever batches are cut."""

from __future__ import annotations

import json

import torch

from lucidrl.algorithms.ppo import Episode, EpisodeCounter

REWARDS = torch.tensor([[1.0, 2, 4, 8, 16, 32], [3, 3, 3, 3, 3, 3]])
DONE = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]).bool()
EPISODES = {Episode(3.0, 2), Episode(28.0, 3), Episode(18.0, 6)}


def test_every_episode_that_ends_is_counted_once():
    assert set(EpisodeCounter(2).count(REWARDS, DONE)) == EPISODES


def test_an_episode_may_continue_across_batches_and_a_resume():
    counter, ended = EpisodeCounter(2), []
    for rewards, done in zip(REWARDS.split(1, dim=1), DONE.split(1, dim=1), strict=True):
        state = json.loads(json.dumps(counter.state_dict()))
        counter = EpisodeCounter(2)
        counter.load_state_dict(state)
        ended += counter.count(rewards, done)
    assert set(ended) == EPISODES
    assert len(ended) == 3


def test_a_batch_in_which_nothing_ends_has_no_episode():
    assert EpisodeCounter(2).count(REWARDS, torch.zeros_like(DONE)) == []
