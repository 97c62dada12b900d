"""Training on written examples: the steps of SFT, of preference optimization and of reward models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lucidrl.algorithms.loop import TrainingLoop
from lucidrl.algorithms.validation import ExampleValidator
from lucidrl.data.datasets import Example
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.items import Item
from lucidrl.data.messages import collate
from lucidrl.data.stream import Dataset
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.interfaces import LossFunction
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span

T = TypeVar("T", bound=Item)


@dataclass
class ExampleTraining(Generic[T]):
    """Training on written examples with the components of its run."""

    loop: TrainingLoop
    policy: Policy
    examples: Dataset[T]
    examples_per_step: int
    batch_of: Callable[[Sequence[T]], BatchedDataDict[Any]]
    """Makes the batch that the loss reads."""
    loss_fn: LossFunction

    def run(self) -> int:
        """Train until `max_steps` or a stop request; return the last completed step."""
        with self.loop.steps(self.state_dict) as steps:
            for step in steps:
                batch = self.batch_of(self.examples.take(self.examples_per_step))
                result = self.policy.train(batch, self.loss_fn)
                self.loop.record(step, result.logged, tokens=float(batch["input_lengths"].sum()))
        return self.loop.step

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


@span("data")
def supervised_batch(
    tokenize: Callable[[Example], LLMMessageLogType], pad_id: int, examples: Sequence[Example]
) -> BatchedDataDict[Any]:
    """Return the rows of examples, in which the tokens of the completions count."""
    batch = collate([tokenize(example) for example in examples], pad_id, supervised=True)
    batch["idx"] = [example.example_id for example in examples]
    return batch
