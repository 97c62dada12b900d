"""What a text collector gives: finished conversations, their rewards, and the batch a policy trains on."""

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
class Conversation:
    """One sample while it grows, turn by turn."""

    prompt: Prompt
    sample: int
    log: LLMMessageLogType
    info: dict[str, Any]
    reward: float = 0.0
    turns: int = 0
    is_done: bool = False
    is_truncated: bool = False
    """An answer was cut at the token limit."""
    is_dropped: bool = False
    """The environment could not judge it; it counts nowhere."""
    metrics: dict[str, float] | None = None
    """Of the environment's last reply."""

    @property
    def name(self) -> str:
        return f"{self.prompt.prompt_id}#{self.sample}"

    @property
    def num_tokens(self) -> int:
        return sum(len(message["token_ids"]) for message in self.log)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(message["token_ids"]) for message in self.log if message["role"] == "assistant")


@dataclass(frozen=True)
class Rollouts:
    """The conversations of one step, those of a prompt side by side."""

    conversations: list[Conversation]
    group_ids: torch.Tensor
    """[B] int64, equal for the samples that are compared with each other."""
    policy_version: int
    """Version of the weights that sampled all of them."""
    metrics: dict[str, float]

    @cached_property
    def rewards(self) -> torch.Tensor:
        """[B] float32; 0 where dropped."""
        return torch.tensor([conversation.reward for conversation in self.conversations], dtype=torch.float32)

    @cached_property
    def is_valid(self) -> torch.Tensor:
        """[B] bool, False where the environment dropped the sample."""
        return torch.tensor([not conversation.is_dropped for conversation in self.conversations])

    @cached_property
    def is_truncated(self) -> torch.Tensor:
        """[B] bool, True where an answer was cut at the token limit."""
        return torch.tensor([conversation.is_truncated for conversation in self.conversations])

    def to_batch(self, pad_id: int) -> BatchedDataDict[Any]:
        """Right-padded training batch; `idx` names each row, dropped samples have `sample_mask` 0."""
        batch = collate(
            [conversation.log for conversation in self.conversations], pad_id, loss_multipliers=self.is_valid.tolist()
        )
        batch["idx"] = [conversation.name for conversation in self.conversations]
        return batch

    def to_samples(self) -> dict[str, list[Any]]:
        """Readable columns for the sample dump."""
        return {
            "sample": [conversation.name for conversation in self.conversations],
            "messages": [
                [{"role": message["role"], "content": message["content"]} for message in conversation.log]
                for conversation in self.conversations
            ],
            "reward": self.rewards.tolist(),
            "policy_version": [self.policy_version] * len(self.conversations),
            "truncated": self.is_truncated.tolist(),
            "dropped": (~self.is_valid).tolist(),
        }
