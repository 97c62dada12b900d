"""PPO: collect frames, estimate the advantages of the actions, and train policy and critic with a clipped loss.

A frame is one step of one env. Shapes: B envs, T time, N = B x T frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from lucidrl.algorithms.advantages import generalized_advantages
from lucidrl.algorithms.config import PPOConfig
from lucidrl.algorithms.interfaces import Stateful
from lucidrl.algorithms.loop import TrainingLoop
from lucidrl.algorithms.step_clock import LOGGING
from lucidrl.collectors.single import Collector
from lucidrl.errors import CheckpointError
from lucidrl.losses.interfaces import Frames
from lucidrl.losses.policy_gradient import ClippedFrameLoss
from lucidrl.models.control.interfaces import ControlTrainResult
from lucidrl.models.control.policy import ControlPolicy
from lucidrl.profiling.spans import span

_EPSILON = 1e-8


@dataclass
class PPO:
    """The PPO algorithm with the components of its run."""

    config: PPOConfig
    loop: TrainingLoop
    policy: ControlPolicy
    collector: Collector
    envs: Sequence[Stateful]
    """One entry per env of the collector; saves and restores the env's unfinished episode."""
    episodes: EpisodeCounter

    def run(self) -> int:
        """Train until `max_steps` or a stop request; return the last completed step."""
        config = self.config
        loss_fn = ClippedFrameLoss(config.clip, config.entropy_coefficient)
        with self.loop.steps(self.state_dict) as steps:
            for step in steps:
                with span("collect"):
                    batch = self.collector.rollout()
                self.loop.saver.settle()
                frames = self.prepare(batch)
                result = self.policy.train(
                    frames, loss_fn, num_epochs=config.num_epochs, minibatch_frames=config.minibatch_frames
                )
                self.collector.update_policy_weights_(version=step)
                self.record(step, batch, frames, result)
        return self.loop.step

    @span("advantages")
    def prepare(self, batch: TensorDictBase) -> Frames:
        """Return the frames of a [B, T] batch with advantages and value targets."""
        batch = batch.to(self.policy.device)
        values_BT = self.policy.values(batch["observation"])
        estimates = generalized_advantages(
            batch["next", "reward"].squeeze(-1),
            values_BT,
            self.policy.values(batch["next", "observation"]),
            batch["next", "terminated"].squeeze(-1),
            batch["next", "done"].squeeze(-1),
            discount=self.config.discount,
            gae_lambda=self.config.gae_lambda,
        )
        advantages_BT = estimates.advantages
        if self.config.normalize_advantages:
            # Normalize over the whole batch, so that the advantage of a frame does not depend on its minibatch.
            advantages_BT = (advantages_BT - advantages_BT.mean()) / (advantages_BT.std(correction=0) + _EPSILON)
        return Frames(
            observations=batch["observation"].flatten(0, 1),
            latent_actions=batch["latent_action"].flatten(0, 1),
            logprobs=batch["sample_log_prob"].flatten(),
            values=values_BT.flatten(),
            advantages=advantages_BT.flatten(),
            value_targets=estimates.value_targets.flatten(),
        )

    @span(LOGGING)
    def record(self, step: int, batch: TensorDictBase, frames: Frames, result: ControlTrainResult) -> None:
        """Log the step and the episodes that ended in it."""
        metrics = {
            **result.metrics,
            "explained_variance": explained_variance(frames.values, frames.value_targets),
            "skipped_optimizer_steps": float(result.num_skipped_steps),
            "frames": float(self.collector.num_frames),
        }
        ended = self.episodes.count(batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1))
        if ended:  # in a batch of long episodes, none may end
            metrics["episode_reward"] = fmean(episode.reward for episode in ended)
            metrics["episode_length"] = fmean(episode.length for episode in ended)
        self.loop.record(step, metrics, frames=float(len(frames)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, except weights and optimizers, as plain values."""
        return {
            "collector": self.collector.state_dict(),
            "envs": [env.state_dict() for env in self.envs],
            "episodes": self.episodes.state_dict(),
            **self.loop.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state["collector"])
        if len(state["envs"]) != len(self.envs):
            raise CheckpointError(
                f"the run was saved with env.num_envs={len(state['envs'])}, not {len(self.envs)}; "
                f"resume with env.num_envs={len(state['envs'])}"
            )
        for env, saved in zip(self.envs, state["envs"], strict=True):
            env.load_state_dict(saved)
        self.episodes.load_state_dict(state["episodes"])
        self.loop.load_state_dict(state)


class Episode(NamedTuple):
    """A finished episode."""

    reward: float
    """Sum of the episode's rewards."""
    length: int
    """Number of frames in the episode."""


class EpisodeCounter:
    """Sums the rewards of each env's episode across batches."""

    def __init__(self, num_envs: int):
        self._rewards, self._lengths = [0.0] * num_envs, [0] * num_envs

    def count(self, rewards_BT: torch.Tensor, done_BT: torch.Tensor) -> list[Episode]:
        """Return the episodes that ended in this batch. The batch must continue the episodes of the previous batch."""
        ended = []
        for env, (rewards, done) in enumerate(zip(rewards_BT.double().cpu(), done_BT.cpu(), strict=True)):
            start = 0
            for end in (done.nonzero()[:, 0] + 1).tolist():
                self._add(env, rewards[start:end])
                ended.append(Episode(self._rewards[env], self._lengths[env]))
                self._rewards[env], self._lengths[env] = 0.0, 0
                start = end
            self._add(env, rewards[start:])
        return ended

    def _add(self, env: int, rewards: torch.Tensor) -> None:
        self._rewards[env] += float(rewards.sum())
        self._lengths[env] += len(rewards)

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": list(self._rewards), "lengths": list(self._lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rewards, self._lengths = list(state["rewards"]), list(state["lengths"])


def explained_variance(values: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the fraction of the targets' variance that the values explain.

    1: the values equal the targets. 0: the values are no better than a constant. NaN or minus infinity: all targets are
    equal.
    """
    return float(1 - (targets - values).var(correction=0) / targets.var(correction=0))
