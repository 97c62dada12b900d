"""What generation takes and gives, and the small interface every engine answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

import torch

if TYPE_CHECKING:
    from lucidrl.distributed.batched_data_dict import BatchedDataDict


class GenerationDatumSpec(TypedDict):
    """Prompts of a generation call: B rows, T tokens."""

    input_ids: torch.Tensor
    """[B, T] right-padded prompt tokens. Rows with the same prompt share its computation."""
    input_lengths: torch.Tensor
    """[B]"""
    stop_strings: NotRequired[list[list[str] | None]]
    """Each row's own stop strings, beside the configured ones."""
    draw_keys: NotRequired[torch.Tensor]
    """[B] int64, the seed of each row's random draws (see `sampling.draw_key`)."""


class GenerationOutputSpec(TypedDict):
    """Completions: B rows, T' tokens of prompt and answer."""

    output_ids: torch.Tensor
    """[B, T'] prompt and answer, right-padded."""
    generation_lengths: torch.Tensor
    """[B] tokens of the answer."""
    unpadded_sequence_lengths: torch.Tensor
    """[B] tokens of prompt and answer."""
    logprobs: torch.Tensor
    """[B, T'] float32, 0 on the prompt and on padding; of the full distribution at the configured temperature."""
    truncated: torch.Tensor
    """[B] bool, True where the answer was cut at the token limit."""
    policy_versions: torch.Tensor
    """[B] int64, the version of the weights that made the completion."""


class GenerationInterface(Protocol):
    """An engine that completes prompts with one version of the policy's weights."""

    policy_version: int
    """The version of the weights that the next call is to use."""

    @property
    def num_replaced(self) -> int:
        """How many of its processes have been replaced since it was made, because they were lost."""

    def update_weights(self, version: int) -> None:
        """From the next call on, use the policy's current weights; they are this version."""
        ...

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]: ...
