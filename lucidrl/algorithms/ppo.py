"""PPO: act for a while, see which actions did better than expected, and make those likelier, in small steps.

Shapes: B envs, T time, N = B x T frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDictBase

from lucidrl.algorithms.config import ControlValidationConfig, PPOConfig
from lucidrl.algorithms.episodes import EpisodeCounter
from lucidrl.algorithms.evaluation import Evaluator
from lucidrl.algorithms.gae import generalized_advantages
from lucidrl.algorithms.interfaces import Stateful
from lucidrl.algorithms.loop import StepClock, StepProfiles, StopRequest, Watcher
from lucidrl.algorithms.ppo_loss import ClippedFrameLoss
from lucidrl.algorithms.resume import processes_state, restore_processes
from lucidrl.algorithms.saver import Saver
from lucidrl.collectors.single import Collector
from lucidrl.models.control.interfaces import ControlTrainResult, Frames
from lucidrl.models.control.policy import ControlPolicy
from lucidrl.profiling.spans import span
from lucidrl.utils.logger import Logger

_EPSILON = 1e-8


@dataclass
class PPO:
    """A PPO run, wired together."""

    config: PPOConfig
    validation: ControlValidationConfig
    policy: ControlPolicy
    collector: Collector
    envs: Stateful
    """The episodes that the collector's envs are in the middle of."""
    episodes: EpisodeCounter
    evaluator: Evaluator | None
    """None turns validation off."""
    logger: Logger
    saver: Saver
    watcher: Watcher
    step: int = 0
    """The last completed step."""

    def run(self) -> int:
        """Train until `max_steps`, or until asked to stop; returns the last completed step, which is saved."""
        loss_fn = ClippedFrameLoss(self.config.clip, self.config.entropy_coefficient)
        clock = StepClock()
        with StopRequest(self.watcher.announce) as stop, StepProfiles(self.policy) as profiles:
            if self.step == 0:
                self.validate()
            for step in range(self.step + 1, self.config.max_steps + 1):
                profiles.begin(step)
                clock.restart()
                with span("collect"):
                    batch = self.collector.rollout()
                self.saver.settle()
                frames = self.prepare(batch)
                result = self.policy.train(
                    frames,
                    loss_fn,
                    num_epochs=self.config.num_epochs,
                    minibatch_frames=self.config.minibatch_frames,
                )
                self.step = step
                self.collector.update_policy_weights_(version=step)
                self.record(batch, frames, result, clock)
                validation = self.validate()
                # Read once: a signal between two questions must not end the run unsaved.
                is_last = stop.is_set or step == self.config.max_steps
                self.saver.end_step(step, self.state_dict, validation, is_last=is_last)
                if is_last:
                    break
        return self.step

    @span("advantages")
    def prepare(self, batch: TensorDictBase) -> Frames:
        """What there is to learn from a [B, T] batch: the advantage of each action, and better values."""
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
            # Over the whole batch, so that what a frame is worth does not depend on its minibatch.
            advantages_BT = (advantages_BT - advantages_BT.mean()) / (advantages_BT.std(correction=0) + _EPSILON)
        return Frames(
            observations=batch["observation"].flatten(0, 1),
            latent_actions=batch["latent_action"].flatten(0, 1),
            logprobs=batch["sample_log_prob"].flatten(),
            values=values_BT.flatten(),
            advantages=advantages_BT.flatten(),
            value_targets=estimates.value_targets.flatten(),
        )

    def record(self, batch: TensorDictBase, frames: Frames, result: ControlTrainResult, clock: StepClock) -> None:
        """Log the step and show it to the watcher."""
        metrics = {
            **result.metrics,
            "explained_variance": explained_variance(frames.values, frames.value_targets),
            "skipped_optimizer_steps": float(result.num_skipped_steps),
            "frames": float(self.collector.num_frames),
        }
        ended = self.episodes.count(batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1))
        if ended:  # a long episode may not end in a batch
            metrics["episode_reward"] = fmean(episode.reward for episode in ended)
            metrics["episode_length"] = fmean(episode.length for episode in ended)
        timings = clock.lap()
        metrics["frames_per_s"] = len(frames) / timings["step_s"]
        self.logger.log_metrics({"train": metrics, "time": timings}, self.step)
        self.watcher.on_step(self.step, {**metrics, **{f"time/{name}": value for name, value in timings.items()}})

    def validate(self) -> dict[str, float]:
        """Metrics of episodes without exploration, where a validation is due."""
        if self.evaluator is None or not self.validation.is_due(self.step, self.config.max_steps):
            return {}
        metrics = self.evaluator.run()
        self.logger.log_metrics(metrics, self.step, prefix="validation")
        self.saver.check_metric(metrics)
        self.watcher.on_validation(self.step, metrics)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, beside weights and optimizers; plain values."""
        return {
            "step": self.step,
            "run_id": self.logger.run_id,
            "collector": self.collector.state_dict(),
            "envs": self.envs.state_dict(),
            "episodes": self.episodes.state_dict(),
            **processes_state(self.policy),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.collector.load_state_dict(state["collector"])
        self.envs.load_state_dict(state["envs"])
        self.episodes.load_state_dict(state["episodes"])
        restore_processes(self.policy, state, self.watcher.announce)


def explained_variance(values: torch.Tensor, targets: torch.Tensor) -> float:
    """Share of the targets' variance that the values account for: 1 is all of it, 0 is that of a constant.

    NaN, or minus infinity, if the targets are all the same.
    """
    return float(1 - (targets - values).var(correction=0) / targets.var(correction=0))
