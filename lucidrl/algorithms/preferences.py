"""Preference optimization: DPO, IPO and KTO raise chosen completions and lower rejected ones.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lucidrl.algorithms.config import DPOConfig
from lucidrl.algorithms.validation import Validation
from lucidrl.data.datasets import Messages, Preference
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.messages import collate
from lucidrl.data.stream import Dataset
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.interfaces import PAIR_IDS, TokenOutputs, sampled_token_mask
from lucidrl.losses.preference import KL_BASELINE, PREFERENCE, REFERENCE_SUMS, PreferenceLoss
from lucidrl.losses.reductions import reduce_metrics
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span

VALIDATED = ("accuracy", "reward_margin", "chosen_reward", "rejected_reward")
"""Metrics of the loss that validation reports."""

Tokenize = Callable[[Preference, Messages], LLMMessageLogType]
"""Returns the message log of a preference's prompt with a completion."""


@dataclass(frozen=True)
class PreferenceRows:
    """Makes batches of preferences: the row of the chosen completion, then that of the rejected one."""

    tokenize: Tokenize
    pad_id: int

    def batch(self, preferences: Sequence[Preference]) -> BatchedDataDict[Any]:
        """Return the rows of the preferences, with the columns `PREFERENCE` and `PAIR_IDS`."""
        entries = [
            (number, sign, completion)
            for number, preference in enumerate(preferences)
            for sign, completion in ((1.0, preference.chosen), (-1.0, preference.rejected))
            if completion is not None
        ]
        batch = self._rows([(preferences[number], completion) for number, _, completion in entries])
        batch[PREFERENCE] = torch.tensor([sign for _, sign, _ in entries])
        batch[PAIR_IDS] = torch.tensor([number for number, _, _ in entries])
        return batch

    def mismatched(self, preferences: Sequence[Preference]) -> BatchedDataDict[Any]:
        """Return rows of each prompt with the completions of the next preference."""
        following = [*preferences[1:], preferences[0]]
        return self._rows(
            [
                (preference, completion)
                for preference, other in zip(preferences, following, strict=True)
                for completion in (other.chosen, other.rejected)
                if completion is not None
            ]
        )

    def _rows(self, entries: Sequence[tuple[Preference, Messages]]) -> BatchedDataDict[Any]:
        """Return rows in which the tokens of the completion count."""
        logs = [self.tokenize(*entry) for entry in entries]
        batch = collate(logs, self.pad_id, supervised=True)
        # The prompt may have assistant messages, which do not count.
        starts_B = torch.tensor(
            [
                sum(len(message["token_ids"]) for message in log[: len(preference.prompt)])
                for log, (preference, _) in zip(logs, entries, strict=True)
            ]
        )
        batch["token_mask"] *= torch.arange(batch["input_ids"].shape[1]) >= starts_B[:, None]
        batch["idx"] = [preference.example_id for preference, _ in entries]
        return batch


class Reference(Protocol):
    """The reference policy."""

    def sums(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """Return the log-probability of each row's completion, [B] float64."""
        ...


@dataclass(frozen=True)
class SwappedReference:
    """The weights that the run started from, which the policy keeps beside its own."""

    policy: Policy

    def sums(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        scored = self.policy.with_scores(_tokens_of(batch), previous=False, reference=True)
        return completion_sums(scored["reference_policy_logprobs"], batch)


def completion_sums(logprobs_BT: torch.Tensor, batch: BatchedDataDict[Any]) -> torch.Tensor:
    """Return the sum over the tokens of each row that count, [B] float64."""
    return logprobs_BT.double().masked_fill(~sampled_token_mask(batch), 0).sum(dim=1)


def _tokens_of(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    return BatchedDataDict({name: batch[name] for name in ("input_ids", "input_lengths")})


@dataclass(frozen=True)
class PreferenceBatches:
    """Makes the batches that a preference loss reads."""

    config: DPOConfig
    policy: Policy
    rows: PreferenceRows
    reference: Reference

    def of(self, preferences: Sequence[Preference]) -> BatchedDataDict[Any]:
        """Return the rows with the scores of the reference policy and, for KTO, the reference point."""
        with span("data"):
            batch = self.rows.batch(preferences)
        batch[REFERENCE_SUMS] = self.reference.sums(batch)
        if self.config.loss == "kto":
            batch[KL_BASELINE] = torch.full((batch.size,), self._kl_baseline(preferences), dtype=torch.float64)
        return batch

    def scored_rows(self, preferences: Sequence[Preference]) -> Iterator[BatchedDataDict[Any]]:
        """Yield all rows of `of` that the reference policy scores."""
        yield self.rows.batch(preferences)
        if self.config.loss == "kto":
            yield self.rows.mismatched(preferences)

    def _kl_baseline(self, preferences: Sequence[Preference]) -> float:
        with span("data"):
            batch = self.rows.mismatched(preferences)
        scored = self.policy.with_scores(_tokens_of(batch), previous=True, reference=False)
        ratio_B = completion_sums(scored["prev_logprobs"], batch) - self.reference.sums(batch)
        return max(0.0, float(ratio_B.mean()))


@dataclass(frozen=True)
class PreferenceValidator:
    """Measures loss and accuracy on held-out preferences."""

    policy: Policy
    preferences: Dataset[Preference]
    num_examples: int
    batches: PreferenceBatches

    def validate(self, step: int, is_stopped: Callable[[], bool]) -> Validation:
        """Return the loss, and the metrics of `PreferenceLoss` that describe pairs.

        The log-probabilities come from scoring, as those of the reference policy do: equal policies are exactly equal.
        """
        batch = self.batches.of(self.preferences.held_out(self.num_examples))
        if is_stopped():
            return Validation({})
        outputs = TokenOutputs(logprobs=self.policy.get_logprobs(_tokens_of(batch)).double())
        counts = torch.tensor(batch.size), batch["token_mask"].sum()
        loss, metrics = PreferenceLoss(self.batches.config)(outputs, batch, *counts)
        reduced = reduce_metrics([(metrics, batch.size)])
        found = {name: reduced[name] for name in VALIDATED if not math.isnan(reduced.get(name, math.nan))}
        return Validation({**found, "loss": float(loss)})
