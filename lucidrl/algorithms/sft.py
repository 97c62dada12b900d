"""Supervised fine-tuning: raise the likelihood of written answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lucidrl.algorithms.config import SFTConfig, ValidationConfig
from lucidrl.algorithms.loop import StepClock, StepProfiles, StopRequest, Watcher
from lucidrl.algorithms.losses import NLLLoss
from lucidrl.algorithms.resume import processes_state, restore_processes
from lucidrl.algorithms.saver import Saver
from lucidrl.algorithms.validation import Validator
from lucidrl.data.datasets import PromptOrder
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.messages import collate
from lucidrl.models.policy.policy import Policy
from lucidrl.utils.logger import Logger
from lucidrl.utils.nsys import ProfilablePolicy


@dataclass
class SFT:
    """A supervised run, wired together."""

    config: SFTConfig
    validation: ValidationConfig
    policy: Policy
    examples: Sequence[LLMMessageLogType]
    order: PromptOrder
    held_out: Sequence[LLMMessageLogType]
    """Examples for the validation loss."""
    validator: Validator | None
    """Lets the environment judge sampled answers, if there is one."""
    logger: Logger
    saver: Saver
    watcher: Watcher
    pad_id: int
    profiled: Sequence[ProfilablePolicy] = ()
    """What is recorded beside policy and driver, such as generators of their own."""
    step: int = 0
    """The last completed step."""
    position: int = 0
    """Examples used so far."""

    def run(self) -> int:
        """Train until `max_steps`, or until asked to stop; returns the last completed step, which is saved."""
        loss_fn = NLLLoss()
        clock = StepClock()
        with StopRequest(self.watcher.announce) as stop, StepProfiles(self.policy, *self.profiled) as profiles:
            if self.step == 0:
                self.validate(loss_fn)
            for step in range(self.step + 1, self.config.max_steps + 1):
                profiles.begin(step)
                clock.restart()
                chosen = self._next_examples()
                batch = collate([self.examples[index] for index in chosen], self.pad_id, supervised=True)
                batch["idx"] = [f"example {index + 1}" for index in chosen]
                result = self.policy.train(batch, loss_fn)
                self.step = step
                timings = clock.lap()
                metrics = {
                    **result.metrics,
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "skipped_optimizer_steps": float(result.num_skipped_steps),
                    "tokens_per_s": float(batch["input_lengths"].sum()) / timings["step_s"],
                }
                self.logger.log_metrics({"train": metrics, "time": timings}, self.step)
                self.watcher.on_step(self.step, {**metrics, **{f"time/{name}": v for name, v in timings.items()}})
                validation = self.validate(loss_fn)
                # Read once: a signal between two questions must not end the run unsaved.
                is_last = stop.is_set or step == self.config.max_steps
                self.saver.end_step(step, self.state_dict, validation, is_last=is_last)
                if is_last:
                    break
        return self.step

    def validate(self, loss_fn: NLLLoss) -> dict[str, float]:
        """Loss on the held-out examples and rewards on the held-out prompts, where a validation is due."""
        if not self.held_out or not self.validation.is_due(self.step, self.config.max_steps):
            return {}
        metrics = {}
        if self.validator is not None:
            self.validator.collector.update_policy_weights_(version=self.step)
            metrics = self.validator.run().metrics
        batch = collate(self.held_out, self.pad_id, supervised=True)
        metrics = {**metrics, "loss": self.policy.train(batch, loss_fn, eval_mode=True).loss}
        self.logger.log_metrics(metrics, self.step, prefix="validation")
        self.saver.check_metric(metrics)
        self.watcher.on_validation(self.step, metrics)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, beside weights and optimizer; plain values."""
        return {
            "step": self.step,
            "position": self.position,
            "run_id": self.logger.run_id,
            **(self.validator.state_dict() if self.validator is not None else {}),
            **processes_state(self.policy),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.position = state["step"], state["position"]
        if self.validator is not None:
            self.validator.load_state_dict(state)
        restore_processes(self.policy, state, self.watcher.announce)

    def _next_examples(self) -> list[int]:
        chosen = self.order.take(self.position, self.config.examples_per_step)
        self.position += len(chosen)
        return chosen
