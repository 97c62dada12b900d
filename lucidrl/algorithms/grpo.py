"""GRPO: sample a group of answers to each prompt, reward them, and move towards those better than their group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lucidrl.algorithms.advantages import compute_advantages, has_signal
from lucidrl.algorithms.config import GRPOConfig, ValidationConfig
from lucidrl.algorithms.loop import StepClock, StepProfiles, StopRequest, Watcher
from lucidrl.algorithms.losses import ClippedPGLoss
from lucidrl.algorithms.resume import processes_state, restore_processes
from lucidrl.algorithms.saver import Saver
from lucidrl.algorithms.validation import Validator
from lucidrl.collectors.rollouts import Rollouts
from lucidrl.collectors.text import TextCollector
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import RefitError
from lucidrl.models.policy.interfaces import TrainResult
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span
from lucidrl.utils.logger import Logger
from lucidrl.utils.nsys import ProfilablePolicy


@dataclass
class GRPO:
    """A GRPO run, wired together."""

    config: GRPOConfig
    validation: ValidationConfig
    policy: Policy
    collector: TextCollector
    validator: Validator
    logger: Logger
    saver: Saver
    watcher: Watcher
    pad_id: int
    on_policy: bool
    """Each batch serves one optimizer step, so that no separate scoring pass is needed."""
    dump_samples_every: int = 0
    """Steps between dumps of readable samples; 0 = none."""
    print_samples_every: int = 0
    """Steps between samples of the validation shown to the watcher; 0 = none."""
    plot_mismatch_every: int = 0
    """Steps between plots of how generation and training differ; 0 = none."""
    profiled: Sequence[ProfilablePolicy] = ()
    """What is recorded beside policy and driver, such as generators of their own."""
    step: int = 0
    """The last completed step."""

    def run(self) -> int:
        """Train until `max_steps`, or until asked to stop; returns the last completed step, which is saved."""
        loss_fn = ClippedPGLoss(self.config.loss, on_policy=self.on_policy)
        clock = StepClock()
        with StopRequest(self.watcher.announce) as stop, StepProfiles(self.policy, *self.profiled) as profiles:
            if self.step == 0:
                self.validate()
            for step in range(self.step + 1, self.config.max_steps + 1):
                profiles.begin(step)
                clock.restart()
                rollouts = self.collector.collect()
                self.saver.settle()
                batch = self.prepare(rollouts, is_plotted=_is_due(self.plot_mismatch_every, step))
                result = self.policy.train(batch, loss_fn)
                self.step = step
                self.collector.update_policy_weights_(version=step)
                self.record(rollouts, batch, result, clock)
                validation = self.validate()
                # Read once: a signal between two questions must not end the run unsaved.
                is_last = stop.is_set or step == self.config.max_steps
                self.saver.end_step(step, self.state_dict, validation, is_last=is_last)
                if is_last:
                    break
        return self.step

    def prepare(self, rollouts: Rollouts, is_plotted: bool = False) -> BatchedDataDict[Any]:
        """The training batch: advantages from rewards, and the log-probabilities that loss or plot compare with.

        Raises:
            RefitError: if other weights made the samples than those that are to learn from them.
        """
        if rollouts.weight_version != self.policy.weight_version:
            raise RefitError(
                f"samples made by weights of version {rollouts.weight_version} meet a policy of version "
                f"{self.policy.weight_version}; update the collector's weights after every step"
            )
        batch = rollouts.to_batch(self.pad_id)
        with span("advantages"):
            batch["advantages"] = compute_advantages(
                self.config.advantages, rollouts.rewards, rollouts.group_ids, rollouts.is_valid
            )
        if self.config.drop_groups_without_signal:
            batch["sample_mask"] *= has_signal(rollouts.rewards, rollouts.group_ids, rollouts.is_valid)
        if self.config.mask_truncated:
            batch["sample_mask"] *= ~rollouts.is_truncated
        needs_reference = self.config.loss.kl_coefficient > 0
        return self.policy.with_scores(batch, previous=not self.on_policy or is_plotted, reference=needs_reference)

    def record(self, rollouts: Rollouts, batch: BatchedDataDict[Any], result: TrainResult, clock: StepClock) -> None:
        """Log the step and show it to the watcher."""
        metrics = {
            **rollouts.metrics,
            **result.metrics,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "skipped_optimizer_steps": float(result.num_skipped_steps),
            "weight_version": float(rollouts.weight_version),
            "weight_age": float(self.step - 1 - rollouts.weight_version),
        }
        timings = clock.lap()
        metrics["tokens_per_s"] = metrics["sampled_tokens"] / timings["step_s"]
        self.logger.log_metrics({"train": metrics, "time": timings}, self.step)
        if _is_due(self.dump_samples_every, self.step):
            self.logger.log_batched_dict_as_jsonl(rollouts.to_samples(), f"samples/step_{self.step}.jsonl")
        if _is_due(self.plot_mismatch_every, self.step):
            curves = {
                **{name: batch[name] for name in ("generation_logprobs", "prev_logprobs", "token_mask")},
                "sample_mask": rollouts.is_valid,
                "prompt_lengths": batch["token_mask"].argmax(dim=1),
                "full_lengths": batch["input_lengths"],
            }
            self.logger.log_plot_token_mult_prob_error(curves, self.step, "train/token_mult_prob_error")
        self.watcher.on_step(self.step, {**metrics, **{f"time/{name}": value for name, value in timings.items()}})

    def validate(self) -> dict[str, float]:
        """Metrics on the held-out prompts, where a validation is due."""
        if not self.validator.prompts or not self.validation.is_due(self.step, self.config.max_steps):
            return {}
        rollouts = self.validator.run()
        self.logger.log_metrics(rollouts.metrics, self.step, prefix="validation")
        self.logger.log_batched_dict_as_jsonl(rollouts.to_samples(), f"samples/validation_{self.step}.jsonl")
        self.saver.check_metric(rollouts.metrics)
        self.watcher.on_validation(self.step, rollouts.metrics)
        if _is_due(self.print_samples_every, self.step):
            logs = [conversation.log for conversation in rollouts.conversations]
            self.watcher.on_samples(self.step, logs, rollouts.rewards.tolist())
        return rollouts.metrics

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, beside weights and optimizer; plain values."""
        return {
            "step": self.step,
            "run_id": self.logger.run_id,
            "collector": self.collector.state_dict(),
            **processes_state(self.policy),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.collector.load_state_dict(state["collector"])
        self.collector.update_policy_weights_(version=self.step)
        restore_processes(self.policy, state, self.watcher.announce)


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
