"""GRPO: sample a group of answers to each prompt, reward them, and move towards those better than their group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lucidrl.algorithms.advantages import compute_advantages, has_signal
from lucidrl.algorithms.config import GRPOConfig
from lucidrl.algorithms.loop import TrainingLoop, is_due
from lucidrl.collectors.rollouts import Rollouts
from lucidrl.collectors.text import TextCollector
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import RefitError
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.models.policy.interfaces import TrainResult
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span


@dataclass
class GRPO:
    """A GRPO run, wired together."""

    config: GRPOConfig
    loop: TrainingLoop
    policy: Policy
    collector: TextCollector
    pad_id: int
    on_policy: bool
    """Each batch serves one optimizer step, so that no separate scoring pass is needed."""
    dump_samples_every: int = 0
    """Steps between dumps of readable samples; 0 = none."""
    plot_mismatch_every: int = 0
    """Steps between plots of how generation and training differ; 0 = none."""

    def run(self) -> int:
        """Train until `max_steps`, or until asked to stop; returns the last completed step."""
        loss_fn = ClippedPGLoss(self.config.loss, on_policy=self.on_policy)
        with self.loop.steps(self.state_dict) as steps:
            for step in steps:
                rollouts = self.collector.collect()
                self.loop.saver.settle()
                batch = self.prepare(rollouts, is_plotted=is_due(self.plot_mismatch_every, step))
                result = self.policy.train(batch, loss_fn)
                self.collector.update_policy_weights_(version=step)
                self.record(step, rollouts, batch, result)
        return self.loop.step

    def prepare(self, rollouts: Rollouts, is_plotted: bool = False) -> BatchedDataDict[Any]:
        """The training batch: advantages from rewards, and the log-probabilities that loss or plot compare with.

        Raises:
            RefitError: if other weights made the samples than those that are to learn from them.
        """
        if rollouts.policy_version != self.policy.policy_version:
            raise RefitError(
                f"samples made by weights of version {rollouts.policy_version} meet a policy of version "
                f"{self.policy.policy_version}; update the collector's weights after every step"
            )
        batch = self._with_advantages(rollouts)
        needs = {
            "prev_logprobs": not self.on_policy or is_plotted,
            "reference_policy_logprobs": self.config.loss.kl_coefficient > 0,
        }
        rows = batch["sample_mask"].nonzero()[:, 0]  # those that are masked out as a whole are not scored, and hold 0
        columns = {name: torch.zeros(batch["input_ids"].shape) for name, is_needed in needs.items() if is_needed}
        if columns and len(rows):
            previous, reference = needs.values()
            scored = self.policy.with_scores(batch.select_indices(rows), previous=previous, reference=reference)
            columns = {name: column.index_copy(0, rows, scored[name]) for name, column in columns.items()}
        for name, column in columns.items():
            batch[name] = column
        return batch

    @span("advantages")
    def _with_advantages(self, rollouts: Rollouts) -> BatchedDataDict[Any]:
        """The rollouts as a batch with `advantages`, in which `sample_mask` leaves out what is not to count."""
        config, rewards, groups, valid = self.config, rollouts.rewards, rollouts.group_ids, rollouts.is_valid
        batch = rollouts.to_batch(self.pad_id)
        batch["advantages"] = compute_advantages(config.advantages, rewards, groups, valid, batch["idx"])
        if config.drop_groups_without_signal:
            batch["sample_mask"] *= has_signal(rewards, groups, valid)
        if config.mask_truncated:
            batch["sample_mask"] *= ~rollouts.is_truncated
        return batch

    def record(self, step: int, rollouts: Rollouts, batch: BatchedDataDict[Any], result: TrainResult) -> None:
        """Log the step, with samples and plots where they are due."""
        metrics = {
            **rollouts.metrics,
            **result.metrics,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "skipped_optimizer_steps": float(result.num_skipped_steps),
            "policy_version": float(rollouts.policy_version),
            "staleness": float(step - 1 - rollouts.policy_version),
        }
        self.loop.record(step, metrics, tokens=metrics["sampled_tokens"])
        logger = self.loop.logger
        if is_due(self.dump_samples_every, step):
            logger.log_batched_dict_as_jsonl(rollouts.to_samples(), f"samples/step_{step}.jsonl")
        if is_due(self.plot_mismatch_every, step):
            columns = ("generation_logprobs", "prev_logprobs", "token_mask", "sample_mask")
            curves = {
                **{name: batch[name] for name in columns},
                "prompt_lengths": batch["token_mask"].argmax(dim=1),
                "full_lengths": batch["input_lengths"],
            }
            logger.log_plot_token_mult_prob_error(curves, step, "train/token_mult_prob_error")

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, beside weights and optimizer; plain values."""
        return {"collector": self.collector.state_dict(), **self.loop.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state["collector"])
        self.collector.update_policy_weights_(version=state["step"])
        self.loop.load_state_dict(state)
