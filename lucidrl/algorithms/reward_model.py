"""Reward models: learn scores of completions from preferences, and measure accuracy and calibration.

Shapes: B rows, P pairs, K bins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import softplus

from lucidrl.algorithms.preferences import PreferenceRows
from lucidrl.algorithms.validation import Validation
from lucidrl.data.datasets import Preference
from lucidrl.data.stream import Dataset
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError
from lucidrl.losses.preference import pairs_of
from lucidrl.models.policy.policy import Policy
from lucidrl.models.reward_model import scored_tokens
from lucidrl.profiling.spans import span
from lucidrl.utils.imports import require_package
from lucidrl.utils.logger import Logger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_BINS = 10


@span("data")
def scored_pairs(rows: PreferenceRows, preferences: Sequence[Preference]) -> BatchedDataDict[Any]:
    """Return the rows of the preferences; `token_mask` marks the token at which each row is scored."""
    batch = rows.batch(preferences)
    batch["token_mask"] = scored_tokens(batch["input_ids"], batch["input_lengths"], rows.pad_id).float()
    return batch


@dataclass(frozen=True)
class Calibration:
    """How often a reward model is right, by its confidence.

    The confidence in a pair is sigmoid(|margin|), from 0.5 to 1, with the margin of both scores. Bins have equal width.
    """

    counts_K: torch.Tensor
    """Pairs per bin."""
    confidences_K: torch.Tensor
    """Mean confidence of each bin; NaN in an empty bin."""
    accuracies_K: torch.Tensor
    """Fraction of pairs in which the chosen completion has the higher score; equal scores count as half right."""

    @classmethod
    def of(cls, margins_P: torch.Tensor) -> Calibration:
        """Compute it from the score of the chosen minus the score of the rejected completion."""
        margins_P = margins_P.double()
        confidence_P = margins_P.abs().sigmoid()
        bin_P = ((confidence_P - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
        counts_K = torch.bincount(bin_P, minlength=NUM_BINS)

        def mean(values_P: torch.Tensor) -> torch.Tensor:
            return torch.zeros(NUM_BINS, dtype=torch.float64).index_add(0, bin_P, values_P) / counts_K

        return cls(counts_K, mean(confidence_P), mean((margins_P.sign() + 1) / 2))

    @property
    def expected_error(self) -> float:
        """Expected calibration error: |accuracy - confidence| of the bins, weighted by their numbers of pairs."""
        gaps_K = (self.accuracies_K - self.confidences_K).abs().nan_to_num(0)
        return float((gaps_K * self.counts_K).sum() / self.counts_K.sum())

    def figure(self) -> Figure:
        """Draw accuracy over confidence; the area of a point is its number of pairs."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 5), layout="tight")
        axes = figure.subplots()
        axes.plot([0.5, 1], [0.5, 1], color="0.6", linestyle="--", label="perfect calibration")
        is_used_K = self.counts_K > 0
        sizes = 400 * self.counts_K[is_used_K] / self.counts_K.sum()
        axes.scatter(self.confidences_K[is_used_K], self.accuracies_K[is_used_K], s=20 + sizes, label="pairs in a bin")
        axes.set(xlabel="confidence, sigmoid(|margin|)", ylabel="accuracy", xlim=(0.48, 1.02), ylim=(-0.02, 1.02))
        axes.set_title(f"{int(self.counts_K.sum())} held-out pairs, calibration error {self.expected_error:.3f}")
        axes.legend(loc="lower right")
        return figure


@dataclass(frozen=True)
class RewardModelValidator:
    """Measures accuracy, margin and calibration on held-out pairs."""

    policy: Policy
    preferences: Dataset[Preference]
    num_examples: int
    rows: PreferenceRows
    logger: Logger

    def validate(self, step: int, is_stopped: Callable[[], bool]) -> Validation:
        """Return the metrics, and log the plot `validation/calibration` if matplotlib is installed."""
        batch = scored_pairs(self.rows, self.preferences.held_out(self.num_examples))
        if is_stopped():
            return Validation({})
        scores_B = self.policy.values(batch)
        chosen_P, rejected_P = pairs_of(batch)
        margins_P = (scores_B[chosen_P] - scores_B[rejected_P]).double()
        calibration = Calibration.of(margins_P)
        try:
            require_package("matplotlib", "a plot of the calibration", extra="plots")
            self.logger.log_plot(calibration.figure(), step, "validation/calibration")
        except ConfigError:
            pass  # an optional package
        metrics = {
            "accuracy": ((margins_P.sign() + 1) / 2).mean(),
            "reward_margin": margins_P.mean(),
            "reward_std": scores_B.double().std(correction=0),
            "loss": softplus(-margins_P).mean(),
        }
        found = {name: float(value) for name, value in metrics.items()}
        return Validation({**found, "calibration_error": calibration.expected_error})
