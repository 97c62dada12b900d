"""GRPO: sample a group of completions per prompt, score them, and reinforce those better than their group's mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from lucidrl.algorithms.config import GRPOConfig
from lucidrl.algorithms.credit import kept_samples, mean_kl, token_advantages
from lucidrl.algorithms.entropy import EntropyController
from lucidrl.algorithms.loop import TrainingLoop, is_due
from lucidrl.algorithms.mismatch import StepGuard
from lucidrl.algorithms.step_clock import LOGGING
from lucidrl.collectors.rollouts import Rollouts
from lucidrl.collectors.text import TextCollector
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import RefitError
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.importance import importance_mask
from lucidrl.losses.interfaces import IMPORTANCE_MASK, STALENESS, LossFunction, sampled_token_mask
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.models.policy.interfaces import TrainResult
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span


@dataclass
class GRPO:
    """The GRPO algorithm with the components of its run."""

    config: GRPOConfig
    loop: TrainingLoop
    policy: Policy
    collector: TextCollector
    pad_id: int
    guard: StepGuard | None = None
    """Compares generation and policy before every update."""
    updates_per_epoch: int = 1
    """Optimizer steps in one pass over the rows of a step."""
    dump_samples_every: int = 0
    """Write the samples of the first step and of every n-th step; 0 = of the first step only."""
    plot_mismatch_every: int = 0
    """Plot the mismatch of generation and training at every n-th step; 0 = never."""
    entropy: EntropyController = field(init=False)
    """Sets the coefficient of the entropy bonus in every step."""

    def __post_init__(self) -> None:
        self.entropy = EntropyController(self.config.entropy_control, self.config.loss.entropy_coefficient)

    @property
    def on_policy(self) -> bool:
        """Whether each batch serves one optimizer update, so that `prev_logprobs` need no separate forward pass."""
        return self.updates_per_epoch == 1 and self.config.num_epochs == 1

    def run(self) -> int:
        """Train until `max_steps` or a stop request; return the last completed step."""
        with self.loop.steps(self.state_dict) as steps:
            for step in steps:
                rollouts = self.collector.collect()
                self.loop.saver.settle()
                batch = self.prepare(rollouts, is_plotted=is_due(self.plot_mismatch_every, step))
                if self.guard is not None and (warning := self.guard.check(step, batch)) is not None:
                    self.loop.warn(step, warning)
                samples = self.samples_of(rollouts, batch) if self._writes_samples(step) else None
                gbs = batch.size // self.updates_per_epoch
                result = self.policy.train(batch, self.loss_fn(), num_epochs=self.config.num_epochs, gbs=gbs)
                self.collector.update_policy_weights_(version=step)
                self.record(step, rollouts, batch, result, samples)
                self.entropy.observe(result.metrics.get("entropy", math.nan))
        return self.loop.step

    def loss_fn(self) -> LossFunction:
        """Return the loss of the next step."""
        return ClippedPGLoss(self.loss_config, on_policy=self.on_policy, measures_entropy=self.entropy.is_on)

    @property
    def loss_config(self) -> ClippedPGConfig:
        """The settings of the next step's loss."""
        return self.config.loss.model_copy(update={"entropy_coefficient": self.entropy.coefficient})

    def prepare(self, rollouts: Rollouts, is_plotted: bool = False) -> BatchedDataDict[Any]:
        """Return the training batch with advantages, and with the log-probabilities that the loss and the plot need.

        Raises:
            RefitError: a token was sampled by another policy version than `async.max_staleness` allows.
        """
        check_staleness(rollouts, self.policy.policy_version, self.config.async_.max_staleness)
        with span("data"):
            batch = rollouts.to_batch(self.pad_id, row_multiple=self.updates_per_epoch)
        rows = rollouts.row_samples
        samples = torch.cat([rows, rows[-1:].expand(batch.size - len(rows))])  # rows that fill up the last global batch
        kept = batch["sample_mask"] * kept_samples(self.config, rollouts)[samples]
        # A KL penalty in the reward concerns the rows too that only the loss ignores: others are compared with them.
        has_kl_in_reward = self.config.advantages.kl_coefficient > 0
        self._add_scores(batch, batch["sample_mask"] if has_kl_in_reward else kept, is_plotted)
        with span("advantages"):
            batch["advantages"] = token_advantages(self.config.advantages, rollouts, batch, samples, kept)
        batch["sample_mask"] = kept
        if self.config.loss.importance_correction == "mask":
            batch[IMPORTANCE_MASK] = importance_mask(self.config.loss, batch)
        return batch

    def _add_scores(self, batch: BatchedDataDict[Any], scored: torch.Tensor, is_plotted: bool) -> None:
        """Add the columns of log-probabilities that loss, advantages and plot need; 0 for rows that are not scored."""
        config = self.config
        masks_by_importance = config.loss.importance_correction == "mask"
        has_kl_in_reward = config.advantages.kl_coefficient > 0
        needs = {
            "prev_logprobs": not self.on_policy or is_plotted or masks_by_importance or has_kl_in_reward,
            "reference_policy_logprobs": config.needs_reference,
        }
        rows = scored.nonzero()[:, 0]
        columns = {name: torch.zeros(batch["input_ids"].shape) for name, is_needed in needs.items() if is_needed}
        if columns and len(rows):
            previous, reference = needs.values()
            found = self.policy.with_scores(batch.select_indices(rows), previous=previous, reference=reference)
            columns = {name: column.index_copy(0, rows, found[name]) for name, column in columns.items()}
        for name, column in columns.items():
            batch[name] = column

    def samples_of(self, rollouts: Rollouts, batch: BatchedDataDict[Any]) -> dict[str, list[Any]]:
        """Return the columns for samples/, with the log-probabilities of the policy before it trains on the batch."""
        shown = rollouts.last_rows[: rollouts.num_with_tokens]
        rows = shown[batch["sample_mask"][shown].bool()]  # masked rows are not scored
        scored = batch.select_indices(rows)
        if "prev_logprobs" not in scored and len(rows):
            scored = self.policy.with_scores(scored, previous=True, reference=False)
        logprobs_of_row = dict(zip(rows.tolist(), scored.get("prev_logprobs", ()), strict=True))
        training = [logprobs_of_row.get(row) for row in shown.tolist()]
        return rollouts.to_samples(training)

    def _writes_samples(self, step: int) -> bool:
        return step == 1 or is_due(self.dump_samples_every, step)

    @span(LOGGING)
    def record(
        self,
        step: int,
        rollouts: Rollouts,
        batch: BatchedDataDict[Any],
        result: TrainResult,
        samples: dict[str, list[Any]] | None = None,
    ) -> None:
        """Log the step, with its samples and with plots when due."""
        rewards = rollouts.rewards[rollouts.is_valid]
        metrics = {
            **rollouts.metrics,
            "reward_std": float(rewards.double().std(correction=0)),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "entropy_estimate": entropy_estimate(batch),
            **result.logged,
            **(self.guard.metrics if self.guard is not None else {}),
            **self._penalties(batch),
            "policy_version": float(rollouts.policy_version),
            **staleness_metrics(batch, self.config.async_.max_staleness),
        }
        self.loop.record(step, metrics, tokens=metrics["sampled_tokens"])
        logger = self.loop.logger
        if samples is not None:
            logger.log_samples(samples, step, "step")
        if is_due(self.plot_mismatch_every, step):
            columns = ("generation_logprobs", "prev_logprobs", "token_mask", "sample_mask")
            curves = {
                **{name: batch[name] for name in columns},
                "prompt_lengths": batch["token_mask"].argmax(dim=1),
                "full_lengths": batch["input_lengths"],
            }
            logger.log_plot_token_mult_prob_error(curves, step, "train/token_mult_prob_error")

    def _penalties(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        """Return the metrics of a KL penalty in the reward and of an adaptive entropy bonus."""
        metrics = {"reward_kl": mean_kl(batch)} if self.config.advantages.kl_coefficient > 0 else {}
        return metrics | ({"entropy_coefficient": self.entropy.coefficient} if self.entropy.is_on else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, except weights and optimizer, as plain values."""
        state = {"collector": self.collector.state_dict(), **self.loop.state_dict()}
        return state | ({"entropy": self.entropy.state_dict()} if self.entropy.is_on else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state["collector"])
        self.collector.update_policy_weights_(version=state["step"])
        self.loop.load_state_dict(state)
        self.entropy.load_state_dict(state.get("entropy", {}))


def entropy_estimate(batch: BatchedDataDict[Any]) -> float:
    """Return the mean negative log-probability of the sampled tokens, an estimate of the entropy per token in nats."""
    sampled = batch["generation_logprobs"][batch["token_mask"].bool()]
    return float(-sampled.double().mean()) if len(sampled) else math.nan


def check_staleness(rollouts: Rollouts, version: int, most: int) -> None:
    """Raise RefitError if a token is more than `most` versions older than the policy, or newer."""
    if rollouts.policy_version != version:
        raise RefitError(
            f"the samples come from policy version {rollouts.policy_version}, but the policy has version {version}; "
            "call update_policy_weights_ of the collector after every step"
        )
    for sample in rollouts.samples:
        oldest, newest = sample.version_range or (version, version)
        if not sample.is_dropped and (oldest < version - most or newest > version):
            raise RefitError(
                f"sample {sample.name} has tokens of the policy versions {oldest} to {newest}, but a step of policy "
                f"version {version} with max_staleness={most} trains on versions {version - most} to {version} only; "
                "this is a fault of the collector"
            )


def staleness_metrics(batch: BatchedDataDict[Any], most: int) -> dict[str, float]:
    """Return the mean staleness of the sampled tokens and, if `most` > 0, the fraction of tokens of each staleness."""
    sampled = sampled_token_mask(batch)
    staleness = batch[STALENESS][sampled] if STALENESS in batch else torch.zeros(int(sampled.sum()))
    mean = float(staleness.double().mean()) if len(staleness) else 0.0
    counts = staleness.long().bincount(minlength=most + 1)
    fractions = {
        f"async/staleness_{number}": int(count) / max(1, len(staleness)) for number, count in enumerate(counts)
    }
    return {"staleness": mean, **(fractions if most else {})}
