"""Columns of a generation call, and the interface of generation engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

import torch

if TYPE_CHECKING:
    from lucidrl.distributed.batched_data_dict import BatchedDataDict


class GenerationDatumSpec(TypedDict):
    """Prompts of a call: B rows, T tokens."""

    input_ids: torch.Tensor
    """[B, T] right-padded prompt tokens; equal prompts are computed once."""
    input_lengths: torch.Tensor
    """[B]"""
    stop_strings: NotRequired[list[list[str] | None]]
    """Stop strings per row, in addition to the configured ones."""
    draw_keys: NotRequired[torch.Tensor]
    """[B] int64, the seed of each row's random stream; see `sampling.draw_key`."""
    max_new_tokens: NotRequired[torch.Tensor]
    """[B] int64, most new tokens of each row, at most the configured number."""
    may_continue: NotRequired[torch.Tensor]
    """[B] bool, whether the prompt of the next call may begin with this row's prompt and completion; see
    `GenerationRequest.may_continue`."""
    continues: NotRequired[torch.Tensor]
    """[B] bool, whether the prompt may begin with a prompt and completion of the call before. A call without such rows
    uses nothing of earlier calls."""


class GenerationOutputSpec(TypedDict):
    """Completions: B rows, T' tokens of prompt and completion."""

    output_ids: torch.Tensor
    """[B, T'] prompt and completion, right-padded."""
    generation_lengths: torch.Tensor
    """[B] tokens of the completion."""
    unpadded_sequence_lengths: torch.Tensor
    """[B] tokens of prompt and completion."""
    logprobs: torch.Tensor
    """[B, T'] float32 log-probabilities under the full distribution at the configured temperature; 0 on the prompt and
    on padding."""
    truncated: torch.Tensor
    """[B] bool, True where the token limit ended the completion."""
    policy_versions: torch.Tensor
    """[B] int64 version of the weights that generated the completion."""


@dataclass(frozen=True)
class RankWeights:
    """Weights that one rank of an engine has in use."""

    version: int
    """Version of the weights in use."""
    checksum: Mapping[str, str]
    """`tensor_checksum` of every tensor that the engine's loader received, by Hugging Face name. Names that the policy
    does not send, such as that of a tied head, are ignored."""


@dataclass(frozen=True)
class RefitReport:
    """What an engine has after a refit, which the policy compares with its own."""

    ranks: Sequence[RankWeights]
    """The weights of each tensor parallel rank; of a single one, if the engine is not tensor parallel."""
    probe_logprobs: torch.Tensor
    """[P - 1] float32 log-probabilities of the probe's tokens but the first, under the full distribution at the
    configured temperature; see `probe_tokens`."""


@dataclass(frozen=True)
class GenerationRequest:
    """One row that an engine completes."""

    request_id: str
    """Unique among the unfinished requests of an engine."""
    prompt_ids: torch.Tensor
    """[T] int64"""
    draw_key: int
    """Seed of the row's random stream; see `sampling.draw_key`."""
    max_new_tokens: int | None = None
    """Most new tokens, at most the configured number; None = the configured number."""
    stop_strings: tuple[str, ...] = ()
    """Stop strings, in addition to the configured ones."""
    greedy: bool = False
    may_continue: bool = False
    """Whether the prompt of a later request may begin with this prompt and completion, as in a conversation. The engine
    then keeps the keys and values of the row while it has space, and until the weights change (with `in_flight=keep`,
    also after). Later requests are recognised by their tokens."""


@dataclass(frozen=True)
class Completion:
    """A finished request: N sampled tokens."""

    request_id: str
    token_ids: torch.Tensor
    """[N] int64"""
    logprobs: torch.Tensor
    """[N] float32 log-probabilities under the full distribution at the configured temperature."""
    policy_versions: torch.Tensor
    """[N] int64, the version of the weights that sampled each token."""
    truncated: bool
    """Whether the token limit ended the completion."""


class Engine(Protocol):
    """Completes requests that come and finish at any time, in the process of the caller.

    Example:
        >>> engine.submit(requests)
        >>> while engine.num_unfinished:
        ...     for completion in engine.step():
        ...         print(completion.request_id, completion.token_ids)
    """

    policy_version: int
    """Version of the weights in use; tokens sampled from now on have this version."""

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests.

        Raises:
            DataError: a prompt is empty or does not fit the context; no request was queued.
        """
        ...

    def step(self) -> list[Completion]:
        """Admit waiting requests, add a token to the running rows, and return the requests that finished."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        ...

    def updating(self, version: int) -> AbstractContextManager[None]:
        """Context inside which the caller replaces the weights; at its end they have this version.

        `policy.generation.in_flight` says what happens to the running rows. With `finish`, the engine completes them
        when the context is entered, and the next `step` returns them. An exception leaves version and rows as they
        were: the caller has kept the earlier weights.
        """
        ...


class GenerationInterface(Protocol):
    """An engine that completes prompts with one version of the policy's weights."""

    policy_version: int
    """Version of the weights that the next call uses."""

    @property
    def num_restarts(self) -> int:
        """Restarts of generator processes so far."""

    @property
    def refit_gb_per_s(self) -> float | None:
        """Size of the weights, in GB of 10**9 bytes, per second of the last refit; None if nothing was copied."""

    def update_weights(self, version: int) -> None:
        """Use the policy's current weights from the next call on; `version` is their version."""
        ...

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]: ...

    def release_memory(self) -> None:
        """Free what only generation needs; call this before training. The next call takes the memory again."""
        ...
