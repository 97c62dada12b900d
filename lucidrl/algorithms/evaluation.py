"""Validation of a control policy: whole episodes, played without exploring.

Shapes: B envs, one for each episode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from lucidrl.envs.base import EnvBase
from lucidrl.envs.policies import as_policy
from lucidrl.profiling.spans import span


@dataclass(frozen=True)
class Evaluator:
    """Plays the same episodes every time."""

    env: EnvBase
    """Of batch size [B]; nobody else steps it."""
    policy: nn.Module
    """On the observation; should draw nothing."""
    device: torch.device
    """Where it computes."""
    seed: int
    """Of the first env; the others have those that follow."""
    max_episode_frames: int
    """A longer episode counts as far as it came."""

    def run(self) -> dict[str, float]:
        """`reward`, the mean over episodes of the sum of rewards, and `length`, their mean number of frames."""
        env, act = self.env, as_policy(self.policy, self.env, self.device)
        root, next_, actions = env.new_frame(), env.new_frame(), env.new_actions()
        observation = {key: torch.from_numpy(array) for key, array in root.observation.items()}
        is_running_B = np.ones(env.batch_size, bool)
        rewards_B, lengths_B = np.zeros(env.batch_size), np.zeros(env.batch_size)
        with span("validate"):
            env.set_seed(self.seed)
            env.reset_into(root)
            for _ in range(self.max_episode_frames):
                for key, action in act(observation).items():
                    actions[key][...] = action.cpu().numpy()
                env.step_and_reset_into(actions, next_, root)
                rewards_B += next_.reward[..., 0] * is_running_B
                lengths_B += is_running_B
                is_running_B &= ~next_.done[..., 0]
                if not is_running_B.any():
                    break
        return {"reward": float(rewards_B.mean()), "length": float(lengths_B.mean())}
