"""The results of a text collector: finished samples, their rewards, and the batch that a policy trains on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.messages import collate
from lucidrl.distributed.batched_data_dict import BatchedDataDict


@dataclass
class Sample:
    """A prompt with its completions and reward; grows turn by turn."""

    prompt: Prompt
    index: int
    """Index among the samples of this prompt in this step."""
    log: LLMMessageLogType
    info: dict[str, Any]
    reward: float = 0.0
    turns: int = 0
    is_done: bool = False
    is_truncated: bool = False
    """A completion was cut at the token limit."""
    is_dropped: bool = False
    """The environment could not score this sample; loss and reward statistics ignore it."""
    metrics: dict[str, float] | None = None
    """Metrics of the environment's last step result."""

    @property
    def name(self) -> str:
        return f"{self.prompt.prompt_id}#{self.index}"

    @property
    def num_tokens(self) -> int:
        return sum(len(message["token_ids"]) for message in self.log)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(message["token_ids"]) for message in self.log if message["role"] == "assistant")


@dataclass(frozen=True)
class Rollouts:
    """The samples of one step, ordered by group."""

    samples: list[Sample]
    group_ids: torch.Tensor
    """[B] int64, equal for the samples of a group."""
    policy_version: int
    """Version of the weights that sampled all completions."""
    metrics: dict[str, float]

    @cached_property
    def rewards(self) -> torch.Tensor:
        """[B] float32; 0 where dropped."""
        return torch.tensor([sample.reward for sample in self.samples], dtype=torch.float32)

    @cached_property
    def is_valid(self) -> torch.Tensor:
        """[B] bool, False where the environment dropped the sample."""
        return torch.tensor([not sample.is_dropped for sample in self.samples])

    @cached_property
    def is_truncated(self) -> torch.Tensor:
        """[B] bool, True where a completion was cut at the token limit."""
        return torch.tensor([sample.is_truncated for sample in self.samples])

    def to_batch(self, pad_id: int) -> BatchedDataDict[Any]:
        """Return a right-padded training batch; `idx` names each row, and dropped samples have `sample_mask` 0."""
        batch = collate([sample.log for sample in self.samples], pad_id, loss_multipliers=self.is_valid.tolist())
        batch["idx"] = [sample.name for sample in self.samples]
        return batch

    def to_samples(self) -> dict[str, list[Any]]:
        """Return human-readable columns for the files in samples/."""
        return {
            "sample": [sample.name for sample in self.samples],
            "messages": [
                [{"role": message["role"], "content": message["content"]} for message in sample.log]
                for sample in self.samples
            ],
            "reward": self.rewards.tolist(),
            "policy_version": [self.policy_version] * len(self.samples),
            "truncated": self.is_truncated.tolist(),
            "dropped": (~self.is_valid).tolist(),
        }
