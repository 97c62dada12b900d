"""Supervised fine-tuning: maximize the likelihood of written completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lucidrl.algorithms.config import SFTConfig
from lucidrl.algorithms.loop import TrainingLoop
from lucidrl.algorithms.validation import ExampleValidator
from lucidrl.data.datasets import Example
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.messages import collate
from lucidrl.data.stream import Dataset
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span


@dataclass
class SFT:
    """Supervised fine-tuning with the components of its run."""

    config: SFTConfig
    loop: TrainingLoop
    policy: Policy
    examples: Dataset[Example]
    tokenize: Callable[[Example], LLMMessageLogType]
    pad_id: int

    def run(self) -> int:
        """Train until `max_steps` or a stop request; return the last completed step."""
        loss_fn = NLLLoss()
        with self.loop.steps(self.state_dict) as steps:
            for step in steps:
                batch = self.next_batch()
                result = self.policy.train(batch, loss_fn)
                self.loop.record(step, result.logged, tokens=float(batch["input_lengths"].sum()))
        return self.loop.step

    @span("data")
    def next_batch(self) -> BatchedDataDict[Any]:
        """Return the batch of the next step."""
        examples = self.examples.take(self.config.examples_per_step)
        batch = collate([self.tokenize(example) for example in examples], self.pad_id, supervised=True)
        batch["idx"] = [example.example_id for example in examples]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, except weights and optimizer, as plain values."""
        validator = self.loop.validator
        kept = validator.state_dict() if isinstance(validator, ExampleValidator) else {}
        return {**self.examples.state_dict(), **kept, **self.loop.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.examples.load_state_dict(state)
        if isinstance(self.loop.validator, ExampleValidator):
            self.loop.validator.load_state_dict(state)
        self.loop.load_state_dict(state)
